"""The data configuration: the training text, and how it becomes examples."""

from dataclasses import dataclass, field

from gregale.data.examples import PAIRS, Packing
from gregale.data.mixtures import check_mixtures
from gregale.data.sources import SourceConfig
from gregale.data.sources.base import CONCAT, ORDER, REFUSE
from gregale.data.tokenizers import BytesConfig, TokenizerConfig
from gregale.errors import KeyedError, UserError
from gregale.settings import Fixed, Range, Settings, at_least, check_path, setting, whole

AUTO = "auto"
SOURCES, VALIDATION = "sources", "validation"
TEXTS = ("path", "files", "train", "train_files", "train_file", "data_path", "data_files", "dataset", "text", "mixture")


@dataclass(frozen=True)
class DataConfig(Settings):
    """The training text, and how it becomes examples."""

    sources: dict[str, SourceConfig] = setting(dict, "documents, by a name of your choice", aliases=TEXTS)
    tokenizer: TokenizerConfig = field(
        default_factory=BytesConfig,
        metadata={
            "help": "what turns text into tokens: bytes, file or bpe",
            "fixed": Fixed("the saved parameters were trained on its tokens"),
        },
    )
    validation: dict[str, SourceConfig] = setting(dict, "only evaluated on", keys_of="data.sources", begins_anew=True)
    held_out: float = setting(
        0.02,
        "share kept to evaluate; 0: nothing",
        range=Range(0, 1, below=True),
        aliases=("val_split", "validation_split", "val_fraction", "eval_fraction", "test_size"),
        fixed=Fixed("what would be held out now has been trained on"),
    )
    shuffle: bool = setting(True, "random order, anew each epoch", fixed=ORDER)
    cross_documents: bool = setting(False, "let attention and loss cross documents")
    replica_mixtures: list[dict[str, float]] = setting(list, "of each replica", range=at_least(0), fixed=ORDER)
    chat_template: str = setting("", "Jinja file; empty: the tokenizer's own, or a built-in one", by_topic=True)
    cache: str = setting("cache", "folder or URL; tokenized text for later runs")
    local_cache: str = setting(AUTO, "of pieces read of a URL; auto: ~/.cache/gregale", by_topic=True)
    workers: int = setting(0, "that tokenize; 0: one a core", range=whole(0, 4096), aliases=("num_workers",))

    def __post_init__(self):
        super().__post_init__()
        for key in ("cache", "local_cache"):
            check_path(key, getattr(self, key))
        for key in (SOURCES, VALIDATION):
            if "" in getattr(self, key):
                raise KeyedError(key, "has a source whose name is empty", "; give it a name, for example `books`.")
        if self.sources and not any(self.weights.values()):
            raise KeyedError("sources", "has no weight above 0", "; give at least one source such a `weight`.")
        check_mixtures(self.replica_mixtures, self.sources)
        for group in (SOURCES, VALIDATION):
            for name, source in getattr(self, group).items():
                if self.cross_documents and source.packing != CONCAT:
                    raise UserError(
                        f"data.cross_documents is true, but data.{group}.{name}.packing is {source.packing}, whose "
                        f"rows keep documents apart. Set cross_documents to false, or packing to {CONCAT}."
                    )
        for name, source in self.validation.items():
            if source.weight != 1:
                raise UserError(
                    f"data.validation.{name}.weight: {source.weight:g} found, but a validation source is evaluated by "
                    "itself, not mixed with others. Leave weight out."
                )

    def packing_of(self, source: SourceConfig) -> Packing:
        """Return how the documents of a source become rows."""
        kind = source.packing if source.rows_together == 1 else PAIRS
        return Packing(kind, source.long_documents or REFUSE, self.cross_documents)

    @property
    def weights(self) -> dict[str, float]:
        return {name: source.weight for name, source in self.sources.items()}

    @property
    def evaluates(self) -> bool:
        """Return whether there is text to evaluate on."""
        return self.held_out > 0 or bool(self.validation)
