"""Own pools of a run."""

from collections.abc import Mapping

from etude.common.api.kinds import RLRun
from etude.common.api.meta import API_VERSION
from etude.common.api.pool.autoscaling import ScalingMode
from etude.common.api.run.roles import EnvironmentRole
from etude.operator import names
from etude.operator.builders.workload import head
from etude.operator.manifests import Manifest

_SIZING = ("autoscaling", "minIdle", "overcommitFactor")
"""Fields that keep hosts without demand."""


def own_pool(
    run: RLRun, labels: Mapping[str, str], role: EnvironmentRole, *, is_running: bool
) -> Manifest:
    """The pool of one environment; without hosts while the run does not need it."""
    template = role.pool_template
    assert template is not None, f"{role.name} refers to a pool"  # noqa: S101 - our own mistake
    access = run.spec.storage.to_json()
    del access["uri"]
    # Its store has the access settings of the run's, unless it sets its own.
    spec = ({"store": access} if access else {}) | template.to_json()
    given = template.observability.to_json()
    spec["observability"] = run.spec.observability.to_json() | given
    if template.mode is ScalingMode.EXTERNAL:
        spec.pop("replicas", None)  # owned by the external autoscaler
    spec = _without_empty(spec)
    if not is_running:
        released = {name: value for name, value in spec.items() if name not in _SIZING}
        spec = released | {"replicas": 0}
    name = names.own_pool(run.metadata.name, role.name)
    return {**head(run, API_VERSION, "EnvPool", name, labels), "spec": spec}


def _without_empty(value: Manifest) -> Manifest:
    """The mapping without empty mappings in it.

    Server-side apply turns a mapping whose keys all go into null, which the schemas of our kinds
    refuse: the mapping itself must not be sent.
    """
    inner = {
        key: _without_empty(each) if isinstance(each, dict) else each for key, each in value.items()
    }
    return {key: each for key, each in inner.items() if each != {}}
