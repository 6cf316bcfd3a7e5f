"""Templates of tasks' images in the cache of a host: marks of the images that need each.

templates/<compat_key>/images/<address>   empty; one for each image that boots the same files

A template without marks belongs to the pool's own images.
"""

import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from etude.envserver.images.pull.bounded_program import FillLimits, measure_folder

_MARKS = "images"


def mark_template(template: Path, image: str) -> None:
    """Note that an image needs a template. Images that differ only in first files share one."""
    (template / _MARKS).mkdir(parents=True, exist_ok=True)
    (template / _MARKS / image).touch()


def prune_templates(templates: Path, used: Collection[str]) -> None:
    """Remove all but the templates with these keys, and those that tasks' images need."""
    for each in _folders(templates):
        if each.name not in used and not (each / _MARKS).is_dir():
            shutil.rmtree(each, ignore_errors=True)


def remove_image(templates: Path, image: str, used: Collection[str]) -> None:
    """Forget an image, and remove its template unless another one needs it.

    Args:
        templates: folder of all templates.
        image: address of the image.
        used: keys of the templates that the pool's own images need.
    """
    for each in _folders(templates):
        if (each / _MARKS / image).is_file():
            (each / _MARKS / image).unlink()
            if each.name not in used and not any((each / _MARKS).iterdir()):
                shutil.rmtree(each, ignore_errors=True)


def image_sizes(templates: Path) -> Mapping[str, int]:
    """Bytes on the disk by image; a template that several need counts for the first."""
    found = Counter[str]()
    for each in _folders(templates):
        size = measure_folder(each, FillLimits()).num_bytes
        for place, mark in enumerate(sorted((each / _MARKS).glob("*"))):
            found[mark.name] += 0 if place else size
    return found


def _folders(templates: Path) -> Iterator[Path]:
    if templates.is_dir():
        yield from (each for each in templates.iterdir() if not each.name.startswith("."))
