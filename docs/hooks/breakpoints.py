"""The list of pages is beside the page from 1,100 pixels on, and not only from 1,220, as the theme has it."""

from pathlib import Path

EMS = {"76.25em": "68.75em", "76.234375em": "68.734375em"}  # from, up to


def on_post_build(config) -> None:
    scripts = [path for path in Path(config["site_dir"], "assets").rglob("*.min.*") if path.suffix in (".css", ".js")]
    texts = {path: path.read_text(encoding="utf-8") for path in scripts}
    for theirs, ours in EMS.items():
        if not any(theirs in text for text in texts.values()):
            raise ValueError(f"the theme has no breakpoint at {theirs} any more")
        texts = {path: text.replace(theirs, ours) for path, text in texts.items()}
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
