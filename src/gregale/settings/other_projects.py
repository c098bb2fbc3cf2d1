"""The configuration keys of other projects beside those of a run.

`docs/migration.md` shows this table, and messages about unknown keys look keys up in it. A row is `their key | our key
| note`; an empty second column: no counterpart. The files that the keys are from stand behind a project's name.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

TABLE = """
[Levanter] `levanter/main/train_lm.py`, `trainer.py`, `models/llama.py`
trainer.id | name
trainer.checkpointer.base_path | runs
trainer.num_train_steps | steps
trainer.seed | seed
data_seed | seed | one seed for weights and data
trainer.train_batch_size | batch.size | one number for the whole run
trainer.per_device_parallelism | batch.microbatches | batch.size / (per_device_parallelism x devices)
model.seq_len | batch.sequence_length
model.hidden_dim | model.hidden
model.intermediate_dim | model.mlp
model.num_layers | model.layers
model.num_heads | model.heads
model.num_kv_heads | model.kv_heads
model.head_dim | model.head_size
model.tie_word_embeddings | model.tied_head
model.layer_norm_epsilon | model.norm_epsilon
model.gradient_checkpointing | compute.remat | true is full, false is none
model.attn_backend | compute.attention
trainer.mp | compute.dtype | p=f32,c=bfloat16 is bfloat16; parameters are always float32
trainer.replica_dcn_axis_size | mesh.replica
trainer.replica_ici_axis_size | mesh.replica | the product of both
trainer.model_axis_size | mesh.model | mesh.data takes the other devices, as FSDP
trainer.fsdp_axis | | axes are fixed; mesh.data splits the parameters
trainer.tensor_parallel_axes | | axes are fixed; mesh.model splits each layer
optimizer.lr_schedule | optimizer.schedule.type
optimizer.warmup | optimizer.schedule.warmup
optimizer.decay | optimizer.schedule.decay | type wsd; optimizer.decay here chooses the parameters with weight decay
optimizer.min_lr_ratio | optimizer.schedule.final
optimizer.beta1 | optimizer.betas | the first of two
optimizer.beta2 | optimizer.betas | the second of two
optimizer.max_grad_norm | optimizer.clip_norm
trainer.steps_per_eval | evaluation.every
trainer.max_eval_batches | evaluation.batches
trainer.checkpointer.save_interval | checkpoint.every | steps, not minutes
trainer.checkpointer.keep | checkpoint.keep_every
trainer.initialize_from | start_from
initialize_from_hf | start_from | after gregale import
trainer.tracker | trackers | a list
trainer.jax_compilation_cache_dir | compilation_cache
data.train_urls | data.sources.<name>.files | type jsonl
data.validation_urls | data.validation
data.train_weights | data.sources.<name>.weight
data.cache_dir | data.cache
z_loss_weight |

[MaxText] `configs/base.yml`
run_name | name
base_output_directory | runs
init_weights_seed | seed
data_shuffle_seed | seed | one seed for weights and data
per_device_batch_size | batch.size | times devices times gradient_accumulation_steps
gradient_accumulation_steps | batch.microbatches | batch.size is already the whole batch
max_target_length | batch.sequence_length
model_name | model.type | huggingface, with model.path
base_emb_dim | model.hidden
base_mlp_dim | model.mlp
base_num_decoder_layers | model.layers
base_num_query_heads | model.heads
base_num_kv_heads | model.kv_heads
head_dim | model.head_size
vocab_size | model.vocabulary
logits_via_embedding | model.tied_head
normalization_layer_epsilon | model.norm_epsilon
rope_max_timescale | model.rotary_base
sliding_window_size | model.sliding_window
num_experts |
dtype | compute.dtype
quantization | compute.matmul | int8 and fp8; both gradients too
remat_policy | compute.remat
attention | compute.attention
num_vocab_tiling | compute.loss_block | tokens in a part, not the number of parts
dcn_data_parallelism | mesh.replica
ici_fsdp_parallelism | mesh.data
ici_tensor_parallelism | mesh.model
ici_pipeline_parallelism | mesh.stage | with pipeline
num_pipeline_microbatches | pipeline.microbatches
num_pipeline_repeats | pipeline.repeats
ici_context_parallelism | mesh.context
ici_expert_parallelism |
opt_type | optimizer.type
learning_rate | optimizer.learning_rate
lr_schedule_type | optimizer.schedule.type
warmup_steps_fraction | optimizer.schedule.warmup
learning_rate_final_fraction | optimizer.schedule.final
wsd_decay_steps_fraction | optimizer.schedule.decay
learning_rate_schedule_steps | | the schedule is as long as the run
adam_b1 | optimizer.betas | the first of two
adam_b2 | optimizer.betas | the second of two
adam_eps | optimizer.epsilon
adam_weight_decay | optimizer.weight_decay
gradient_clipping_threshold | optimizer.clip_norm | null, not 0, for none
dropout_rate |
eval_interval | evaluation.every
eval_steps | evaluation.batches
checkpoint_period | checkpoint.every
max_num_checkpoints_to_keep | checkpoint.keep_last
load_parameters_path | start_from
log_period | log_every
jax_cache_dir | compilation_cache
dataset_type | data.sources.<name>.type
grain_train_files | data.sources.<name>.files | ArrayRecord is not read
hf_path | data.sources.<name>.path | type huggingface
tokenizer_path | data.tokenizer.path | a tokenizer.json

[torchtitan] `torchtitan/config/job_config.py`, `models/llama3/model/args.py`
job.dump_folder | runs
training.steps | steps
training.seed | seed
debug.seed | seed
training.global_batch_size | batch.size
training.local_batch_size | batch.microbatches | batch.size / (local_batch_size x data-parallel devices)
training.seq_len | batch.sequence_length
model.flavor | model.type | the sizes are keys; or type huggingface, with model.path
dim | model.hidden
n_layers | model.layers
n_heads | model.heads
n_kv_heads | model.kv_heads
ffn_dim_multiplier | model.mlp | the width itself
norm_eps | model.norm_epsilon
rope_theta | model.rotary_base
model.hf_assets_path | data.tokenizer.path | its tokenizer.json
training.mixed_precision_param | compute.dtype
training.mixed_precision_reduce | reduce.codec | none is float32
training.enable_cpu_offload |
training.compile | | everything is compiled
activation_checkpoint.mode | compute.remat
parallelism.data_parallel_replicate_degree | mesh.replica
parallelism.data_parallel_shard_degree | mesh.data
parallelism.fsdp_reshard_after_forward | compute.gather | always is per_layer, never is per_step
parallelism.tensor_parallel_degree | mesh.model
parallelism.pipeline_parallel_degree | mesh.stage | with pipeline
parallelism.pipeline_parallel_microbatch_size | pipeline.microbatches | their number, not their size
parallelism.context_parallel_degree | mesh.context
parallelism.expert_parallel_degree |
fault_tolerance.semi_sync_method | sync.type
fault_tolerance.sync_steps | sync.period
fault_tolerance.fragment_sync_delay | sync.delay
fault_tolerance.fragment_update_alpha | sync.alpha
optimizer.name | optimizer.type
optimizer.lr | optimizer.learning_rate
optimizer.beta1 | optimizer.betas | the first of two
optimizer.beta2 | optimizer.betas | the second of two
optimizer.eps | optimizer.epsilon
lr_scheduler.warmup_steps | optimizer.schedule.warmup
lr_scheduler.decay_type | optimizer.schedule.type
lr_scheduler.decay_ratio | optimizer.schedule.decay | type wsd
lr_scheduler.min_lr_factor | optimizer.schedule.final
training.max_norm | optimizer.clip_norm
validation.freq | evaluation.every
validation.steps | evaluation.batches
checkpoint.interval | checkpoint.every
checkpoint.keep_latest_k | checkpoint.keep_last
checkpoint.initial_load_path | start_from
metrics.log_freq | log_every
metrics.enable_tensorboard | trackers | [{type: tensorboard}]
metrics.enable_wandb | trackers | [{type: wandb}]
training.dataset_path | data.sources.<name>.path
experimental.custom_import | plugins

[litgpt] `litgpt/pretrain.py`, `args.py`, `config.py`
out_dir | runs
train.max_steps | steps
train.max_tokens | steps | tokens / (batch.size x batch.sequence_length)
train.epochs | | steps; a run reports its epochs
train.max_time |
train.global_batch_size | batch.size
train.micro_batch_size | batch.microbatches | batch.size / (micro_batch_size x devices)
train.max_seq_length | batch.sequence_length
model_name | model.type | huggingface, with model.path
model_config.block_size | batch.sequence_length
model_config.n_embd | model.hidden
model_config.n_layer | model.layers
model_config.n_head | model.heads
model_config.n_query_groups | model.kv_heads
model_config.head_size | model.head_size
model_config.intermediate_size | model.mlp
model_config.padded_vocab_size | model.vocabulary
model_config.rope_base | model.rotary_base
model_config.norm_eps | model.norm_epsilon
train.tie_embeddings | model.tied_head
precision | compute.dtype | bf16-mixed is bfloat16, 32-true is float32; parameters are always float32
devices | mesh.data | -1 takes all
num_nodes | distributed.processes
optimizer.class_path | optimizer.type
optimizer.init_args.lr | optimizer.learning_rate
optimizer.init_args.weight_decay | optimizer.weight_decay
optimizer.init_args.betas | optimizer.betas
train.lr_warmup_steps | optimizer.schedule.warmup
train.lr_warmup_fraction | optimizer.schedule.warmup
train.min_lr | optimizer.schedule.final | divided by the learning rate
train.max_norm | optimizer.clip_norm
eval.interval | evaluation.every
eval.max_iters | evaluation.batches
train.save_interval | checkpoint.every
train.log_interval | log_every
initial_checkpoint_dir | start_from
resume | | the same command resumes
tokenizer_dir | data.tokenizer.path | its tokenizer.json
logger_name | trackers | [{type: tensorboard}]

[nanochat] `scripts/base_train.py`
model-tag | name
num-iterations | steps
target-param-data-ratio | steps | ratio x parameters / tokens of a batch
target-flops |
total-batch-size | batch.size | tokens / sequence_length
device-batch-size | batch.microbatches | batch.size / (device-batch-size x devices)
max-seq-len | batch.sequence_length
depth | model.layers
aspect-ratio | model.hidden | depth x aspect-ratio
head-dim | model.head_size
window-pattern | model.sliding_window | model.full_layers are the layers of letter L
fp8 | compute.matmul | true is fp8
matrix-lr | optimizer.learning_rate | type muon
embedding-lr | optimizer.adamw_learning_rate | one for all that Muon leaves out
unembedding-lr | optimizer.adamw_learning_rate | one for all that Muon leaves out
scalar-lr | optimizer.adamw_learning_rate | one for all that Muon leaves out
weight-decay | optimizer.weight_decay
warmup-steps | optimizer.schedule.warmup
warmdown-ratio | optimizer.schedule.decay | type wsd
final-lr-frac | optimizer.schedule.final
eval-every | evaluation.every
eval-tokens | evaluation.batches | tokens / (batch.size x batch.sequence_length)
core-metric-every | evaluation.tasks | at every evaluation
sample-every | samples.prompts | at every evaluation
save-every | checkpoint.every
resume-from-step | | the same command resumes from the newest checkpoint
run | trackers | [{type: wandb}]; the run has its name
"""
MOST_SHOWN = 8


class Counterpart(NamedTuple):
    """A row of the table; `ours` is "" if there is no counterpart."""

    project: str
    theirs: str
    ours: str
    note: str

    @property
    def sentence(self) -> str:
        """Return the row as a part of a message."""
        found = f"`{self.theirs}` of {self.project} "
        found += f"is `{self.ours}` here" if self.ours else "has no counterpart here"
        return f"{found} ({self.note})" if self.note else found


@cache
def projects() -> dict[str, str]:
    """Return each project's name and the files that its keys are from."""
    heads = [line[1:].partition("] ") for line in TABLE.splitlines() if line.startswith("[")]
    return {name: files for name, _, files in heads}


@cache
def counterparts() -> tuple[Counterpart, ...]:
    """Return the rows of all projects in the order of the table."""
    found, project = [], ""
    for line in filter(None, TABLE.splitlines()):
        if line.startswith("["):
            project = line[1:].partition("]")[0]
        else:
            theirs, ours, note = ([part.strip() for part in line.split("|", 2)] + [""])[:3]
            found.append(Counterpart(project, theirs, ours, note))
    return tuple(found)


@cache
def names_of(key: str) -> tuple[str, ...]:
    """Return the names that other projects have for a key of ours, without the sections above them.

    Only names with an underscore, because shorter ones (`interval`, `mode`) say little without their section. The outer
    optimizer has the names of the optimizer.
    """
    ours: dict[str, set[str]] = {}
    for row in counterparts():
        ours.setdefault(_written(row.theirs).rpartition(".")[2], set()).add(row.ours)
    key = key.replace("sync.outer.", "optimizer.", 1)
    return tuple(name for name, keys in ours.items() if keys == {key} and "_" in name and key.split(".")[-1] != name)


def rows_at(key: str, value: Any) -> list[Counterpart]:
    """Return the rows of a key of another project; for a section (a mapping), those of the keys in it.

    Of equal rows of several projects it returns the first.
    """
    written = {_written(each) for each in _keys_in(key, value)}
    found = {(_written(row.theirs), row.ours): row for row in reversed(counterparts())}
    return [row for row in counterparts() if _written(row.theirs) in written and row in found.values()]


def sentences(rows: list[Counterpart]) -> str:
    """Return rows as one sentence for a message; "" for none."""
    shown = "; ".join(row.sentence for row in rows[:MOST_SHOWN])
    more = f"; docs/migration.md has {len(rows) - MOST_SHOWN} more of these keys" if len(rows) > MOST_SHOWN else ""
    return f" {shown}{more}." if rows else ""


def _keys_in(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _keys_in(f"{key}.{name}", inner)
    else:
        yield key


def _written(key: str) -> str:
    return key.lower().replace("-", "_")
