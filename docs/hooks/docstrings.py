"""Lists in docstrings follow their first line at once; Markdown wants an empty line between."""

import re

import griffe

BEGINS_LIST = re.compile(r"^(?![\s-]).*\n(?=- )", re.MULTILINE)


class Lists(griffe.Extension):
    """Puts the empty line there."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            obj.docstring.value = BEGINS_LIST.sub(lambda found: found[0] + "\n", obj.docstring.value)
