"""The kind registry."""

from etude.common.api.schema import crd
from etude.operator.kind_registry import KINDS
from etude.operator.manifests import OWN_KINDS, RESOURCES


def test_every_custom_resource_has_an_entry_in_the_registry() -> None:
    assert {kind.definition for kind in KINDS} == set(crd.KINDS)
    assert {kind.name for kind in KINDS} == set(OWN_KINDS)
    assert all(RESOURCES[kind.name].plural == kind.definition.plural for kind in KINDS)


def test_an_entry_has_the_models_of_its_custom_resource() -> None:
    for kind in KINDS:
        assert kind.status is kind.definition.status
        assert kind.model.model_fields["spec"].annotation is kind.definition.spec
