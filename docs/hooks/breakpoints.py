"""The list of pages is beside the page from 1,100 pixels on, and not only from 1,220, as the theme has it."""

from pathlib import Path

EMS = {"76.25em": "68.75em", "76.1875em": "68.6875em"}


def on_post_build(config) -> None:
    for path in Path(config["site_dir"], "assets").rglob("*.min.*s"):
        if path.suffix in (".css", ".js"):
            text = path.read_text(encoding="utf-8")
            for theirs, ours in EMS.items():
                text = text.replace(theirs, ours)
            path.write_text(text, encoding="utf-8")
