"""Greedy texts of a batch are those of `transformers.generate`, past windows and in scaled rotary frequencies."""

from functools import partial
from itertools import repeat

import jax
import numpy as np
import pytest
from haliax import Axis

from gregale.huggingface.folder import open_folder
from gregale.huggingface.weights import read_model
from gregale.inference.generate import BLOCK, Generator, Prompt
from gregale.inference.token_sampling import Sampling
from gregale.model.llama import Llama
from tests.huggingface.hub import CONTEXT, MODELS, VOCABULARY, made
from tests.mesh.support import layout_of, one_device

END, TOKENS = 256, 30
PROMPTS = [b"the wind ", b"a", b"north, north-east, and then a gale"]


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_greedy_tokens_of_a_batch_are_those_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    theirs = made(name, tmp_path)
    folder = open_folder(tmp_path)
    Vocab = Axis("vocab", VOCABULARY)
    abstract = jax.eval_shape(partial(Llama.init, folder.model, Vocab), jax.random.key(0))
    model = read_model(folder, abstract, layout_of()).unstacked()
    generator = Generator(one_device(weights_ready=True), VOCABULARY, [END])
    prompts = [Prompt(list(prompt)) for prompt in PROMPTS]
    found = np.concatenate(list(generator.blocks(model, prompts, TOKENS, Sampling(0), repeat(BLOCK))), axis=1)
    window = MODELS[name][1].get("sliding_window", CONTEXT)
    assert any(len(prompt) > window for prompt in PROMPTS) == (name == "mistral")
    for prompt, row in zip(PROMPTS, found.tolist(), strict=True):
        ids = torch.tensor([list(prompt)])
        options = {"max_new_tokens": TOKENS, "do_sample": False, "pad_token_id": 0}
        expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        assert row[: len(expected)] == expected
        assert len(expected) == TOKENS or expected[-1] == END
