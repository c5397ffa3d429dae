"""The sentences about names."""

import pytest

from nestfed.core import NestfedError, one_of, unknown


@pytest.mark.parametrize(
    ("name", "known", "owner", "sentence"),
    [
        ("AP", ["ap", "auroc"], "", "There is no metric 'AP'; did you mean ap?"),
        ("zzz", ["b", "a"], "", "There is no metric 'zzz'; choose one of a, b."),
        ("zzz", [], "", "There is no metric 'zzz'; there are none."),
        ("auprc", ["auroc"], "a.csv", "a.csv has no metric 'auprc'; did you mean auroc?"),
        ("#", [f"c{i:03}" for i in range(500)], "", ", c038, c039, …."),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_with_a_short_list(
    name: str, known: list[str], owner: str, sentence: str
) -> None:
    assert str(unknown("metric", name, known, owner)).endswith(sentence)


def test_a_value_is_one_of_a_few() -> None:
    one_of("run.sites", "alone", ("federated", "alone"))
    with pytest.raises(NestfedError, match=r"^run\.sites must be federated, alone or none, not 'apart'\.$"):
        one_of("run.sites", "apart", ("federated", "alone", "none"))
