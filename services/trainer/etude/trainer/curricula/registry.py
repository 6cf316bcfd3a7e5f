"""Registry of curricula: those of Etude, and those that installed packages add."""

from collections.abc import Mapping
from types import MappingProxyType

from etude.common import extensions
from etude.trainer.curricula import solve_rate_band
from etude.trainer.curricula.base import Curriculum

CURRICULA: Mapping[str, Curriculum] = MappingProxyType(
    {"SolveRateBand": solve_rate_band.CURRICULUM}
)


def find_curriculum(name: str) -> Curriculum:
    """Find a curriculum that a manifest names, which the API checked.

    Raises:
        UserError: a package's curriculum is not installed or broken.
    """
    if extensions.is_extension(name):
        return extensions.load_extension(extensions.CURRICULA, name, Curriculum)
    return CURRICULA[name]
