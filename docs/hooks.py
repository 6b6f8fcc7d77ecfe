"""The front page is the README, whose links are those of the repository."""

from pathlib import Path


def on_page_markdown(markdown, page, **_):
    if page.file.src_uri != "index.md":
        return markdown
    text = (Path(__file__).parents[1] / "README.md").read_text()
    return text.replace("](docs/", "](")
