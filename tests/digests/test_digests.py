"""The command that hashes numbers: it repeats itself, and a changed constant changes the lines of its method alone."""

import fedbc_lightning.algorithms as algorithms
from digests.cases import all_cases
from digests.digest import digest
from digests.running import result_of, selected
from fedbc_lightning.algorithms import FedAvgM


def test_every_method_has_cases_in_both_engines():
    cases = all_cases().values()
    assert {case.algorithm for case in cases} >= set(algorithms.__all__) - {"FederatedAlgorithm"}
    vectorized = {case.algorithm for case in cases if "/vectorized/" in case.name}
    assert {case.algorithm for case in cases} - vectorized == {
        "L2GD", "L2SGD", "L2SGD2", "L2SGDPlus", "L2SGDPlusPlus", "MOON",
    }  # fmt: skip


def test_patterns_choose_by_class_and_by_name():
    assert {case.algorithm for case in selected(["FedBC"])} == {"FedBC"}
    names = [case.name for case in selected(["apfl/*/float64/1"])]
    assert names == ["apfl/sequential/float64/1", "apfl/vectorized/float64/1"]
    assert selected(["nothing"]) == []


def test_a_changed_constant_changes_its_own_lines(tmp_path, monkeypatch):
    cases = {name: all_cases()[f"{name}/sequential/float64/1"] for name in ("fedprox-samples", "fedavgm-default")}

    def hashes() -> dict[str, str]:
        return {name: digest(result_of(case, tmp_path)) for name, case in cases.items()}

    before = hashes()
    assert hashes() == before
    declared = FedAvgM.__init__
    monkeypatch.setattr(FedAvgM, "__init__", lambda self: declared(self, momentum=0.9 + 1e-9))
    after = hashes()
    assert {name for name in cases if after[name] != before[name]} == {"fedavgm-default"}
