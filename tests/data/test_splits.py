"""Splits by patient: folds, marks of the table, and patients of the configuration."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from medseg.data.case_table import Case, Split, count_folds, split_cases
from medseg.errors import UserError


def case(name: str, patient: str, split: str | None = None, fold: int | None = None) -> Case:
    return Case(name, Path(name), None, patient, split, fold=fold)


# 11 patients, of whom every third has two scans
CASES = [case(f"c{n}_{scan}", f"p{n}") for n in range(11) for scan in range(1 + (n % 3 == 0))]


def patients(cases: tuple[Case, ...]) -> set[str]:
    return {case.patient for case in cases}


def names(split: Split) -> list[set[str]]:
    return [{case.name for case in side} for side in (split.train, split.val, split.test)]


@pytest.mark.parametrize(
    ("num_folds", "test_patients"), [(2, ["p4"]), (3, []), (5, ["p0", "p4"]), (11, [])]
)
def test_folds_validate_each_patient_once_and_leak_none(
    num_folds: int, test_patients: list[str]
) -> None:
    validated: list[str] = []
    sizes = set()
    for fold in range(num_folds):
        split = split_cases(CASES, fold=fold, num_folds=num_folds, test_patients=test_patients)
        assert not patients(split.train) & patients(split.val)
        assert patients(split.test) == set(test_patients)
        assert len(split.train) + len(split.val) + len(split.test) == len(CASES)
        validated += sorted(patients(split.val))
        sizes.add(len(patients(split.val)))
    assert sorted([*validated, *test_patients]) == sorted(patients(tuple(CASES)))
    assert max(sizes) - min(sizes) <= 1


def test_row_order_is_irrelevant_and_no_fold_is_fold_zero() -> None:
    shuffled = random.Random(3).sample(CASES, len(CASES))
    assert names(split_cases(CASES, fold=2)) == names(split_cases(shuffled, fold=2))
    assert (
        names(split_cases(CASES))
        == names(split_cases(CASES, fold=0))
        != names(split_cases(CASES, fold=1))
    )


def test_explicit_patients_win_over_the_table() -> None:
    cases = [
        case("a", "pa", "train"),
        case("b", "pb", "val"),
        case("c", "pc", "test"),
        case("d", "pd"),
    ]
    assert names(split_cases(cases)) == [{"a", "d"}, {"b"}, {"c"}]
    assert names(split_cases(cases, val_patients=["pa"])) == [{"b", "d"}, {"a"}, {"c"}]
    assert names(split_cases(cases, test_patients=["pb"], val_patients=["pa"])) == [
        {"d"},
        {"a"},
        {"b", "c"},
    ]


def test_a_patient_who_is_named_for_validation_is_no_test_patient_of_the_table() -> None:
    cases = [case("a", "pa"), case("b", "pb", "test"), case("c", "pc", "test"), case("b2", "pb")]
    assert names(split_cases(cases, val_patients=["pb"])) == [{"a"}, {"b", "b2"}, {"c"}]
    assert names(split_cases(cases, fold="all")) == [{"a"}, set(), {"b", "b2", "c"}]


def test_a_patient_is_found_in_whichever_way_the_configuration_writes_the_name() -> None:
    """A letter may be one character, as in a table that was read, or two."""
    cases = [case("a", "M\u00fcller"), case("b", "Weiss"), case("c", "J\u00f6rg")]
    split = split_cases(cases, val_patients=["Mu\u0308ller"], test_patients=["Jo\u0308rg"])
    assert names(split) == [{"b"}, {"a"}, {"c"}]


def test_a_table_that_marks_test_alone_is_folded_without_it() -> None:
    cases = [case("a", "pa"), case("b", "pb"), case("c", "pc", "test"), case("c2", "pc")]
    for fold in range(2):
        train, val, test = names(split_cases(cases, fold=fold, num_folds=2))
        assert test == {"c", "c2"}  # the unmarked scan follows its patient
        assert train | val == {"a", "b"}
        assert len(val) == 1


def test_folds_of_the_table_are_validated_one_at_a_time() -> None:
    cases = [
        case("a", "pa", fold=0),
        case("b", "pb", fold=1),
        case("b2", "pb"),
        case("c", "pc"),
        case("d", "pd", "test", 1),
    ]
    assert names(split_cases(cases)) == [{"b", "b2", "c"}, {"a"}, {"d"}]
    assert names(split_cases(cases, fold=1)) == [{"a", "c"}, {"b", "b2"}, {"d"}]
    assert names(split_cases(cases, fold="all")) == [{"a", "b", "b2", "c"}, set(), {"d"}]
    assert names(split_cases(cases, val_patients=["pc"])) == [{"a", "b", "b2"}, {"c"}, {"d"}]


def test_a_fold_counts_in_place_of_the_words_train_and_val() -> None:
    marks = ["train", "val", None, "test", "train", "val"]
    marked = [case(f"c{n}", f"p{n}", split) for n, split in enumerate(marks)]
    unmarked = [case(f"c{n}", f"p{n}", "test" if n == 3 else None) for n in range(6)]
    assert names(split_cases(marked))[1] == {"c1", "c5"}
    for fold in range(5):
        of_fold = names(split_cases(marked, fold=fold))
        assert of_fold == names(split_cases(unmarked, fold=fold))
        assert of_fold[2] == {"c3"}
    numbered = [case("a", "p", "val", 0), case("b", "q", None, 1), case("c", "r", "train", 2)]
    assert names(split_cases(numbered, fold=2)) == [{"a", "b"}, {"c"}, set()]


@pytest.mark.parametrize(
    ("cases", "arguments", "part"),
    [
        (CASES, {"val_patients": ["p_4"]}, "did you mean p4"),
        (CASES, {"test_patients": ["zz"]}, "data.test_patients names the patient 'zz'"),
        (
            CASES,
            {"val_patients": ["p1"], "test_patients": ["p1"]},
            "'p1' is in data.val_patients and",
        ),
        (CASES, {"val_patients": ["p1"], "fold": 0}, "data.fold=0 has no effect"),
        (CASES, {"fold": 5}, "choose 0 to 4"),
        (CASES, {"num_folds": 12, "fold": 0}, "from 2 to 11"),
        ([case("a", "p")], {"fold": 0}, "add patients, or train on all with data.fold=all"),
        (CASES[:2], {"val_patients": ["p0"]}, "No case is left for training"),
        ([case("a", "p", "train"), case("b", "p", "val")], {}, "'p' is marked train and val"),
        (
            [case("a", "p", fold=0), case("b", "p", fold=1)],
            {},
            "'p' is marked 0 and 1 in the case table; give all scans of one patient the same fold",
        ),
        (
            [case("a", "p", fold=0), case("b", "q", fold=2)],
            {"fold": 1},
            "data.fold=1: the column fold of the case table has no such fold; choose one of 0, 2",
        ),
    ],
)
def test_mistakes(cases: list[Case], arguments: dict, part: str) -> None:
    with pytest.raises(UserError) as error:
        split_cases(cases, **arguments)
    assert part in str(error.value)


def test_an_unknown_patient_is_told_with_similar_names_or_the_first_ones() -> None:
    with pytest.raises(UserError) as error:
        split_cases(CASES, test_patients=["p1xxxx"])
    assert str(error.value).endswith("not in the case table; did you mean p1 or p10?")
    with pytest.raises(UserError) as error:
        split_cases(CASES, val_patients=["somebody else"])
    assert str(error.value).endswith("not in the case table; the table has p0, p1, p10, p2, p3, …")
    with pytest.raises(
        UserError, match=r"'p2' is in data\.val_patients and in data\.test_patients"
    ):
        split_cases(CASES, val_patients=["p1", "p2"], test_patients=["p2", "p4"])


def test_few_patients_make_fewer_folds_unless_folds_are_asked_for() -> None:
    three = split_cases(CASES[:3], num_folds=5)
    assert len({case.patient for case in three.val}) == 1
    assert three.train
    (single,) = {case.patient for case in CASES[:1]}
    alone = split_cases([case for case in CASES if case.patient == single], num_folds=5)
    assert alone.train
    assert not alone.val


def test_fold_all_trains_on_everybody_but_the_test_patients() -> None:
    marked = [*CASES, case("v", "marked", "val"), case("t", "tested", "test")]
    split = split_cases(marked, fold="all", test_patients=["p3"])
    assert patients(split.train) == {"marked", *(f"p{n}" for n in range(11) if n != 3)}
    assert not split.val
    assert patients(split.test) == {"tested", "p3"}
    with pytest.raises(
        UserError, match=r"data\.fold=all trains on everybody, but data\.val_patients"
    ):
        split_cases(marked, fold="all", val_patients=["p1"])


def test_names_in_turns_do_not_end_in_one_fold() -> None:
    """Every fifth patient is of one hospital, and the names are sorted by patient."""
    in_turns = [case(f"c{n}", f"p{n:02d} of hospital {n % 5}") for n in range(40)]
    for fold in range(5):
        hospitals = {
            patient[-1] for patient in patients(split_cases(in_turns, fold=fold, num_folds=5).val)
        }
        assert len(hospitals) > 1


def listed(name: str, *sides: str | None, patient: str = "", split: str | None = None) -> Case:
    return Case(name, Path(name), None, patient or name, split, fold_sides=sides)


def test_columns_that_name_both_sides_of_each_fold_are_obeyed() -> None:
    cases = [
        listed("a", "train", "val"),
        listed("b", "val", "train"),
        listed("c", "train", None),
        listed("d", None, None),
        listed("e", None, None, split="test"),
        listed("a2", None, None, patient="a"),
    ]
    assert (
        names(split_cases(cases)) == names(split_cases(cases, fold=0)) == [{"a", "c"}, {"b"}, {"e"}]
    )
    assert names(split_cases(cases, fold=1)) == [{"b"}, {"a"}, {"e"}]
    assert names(split_cases(cases, fold="all")) == [{"a", "b", "c"}, set(), {"e"}]
    assert names(split_cases(cases, val_patients=["b"])) == [{"a", "c"}, {"b"}, {"e"}]
    assert names(split_cases(cases, test_patients=["c"])) == [{"a"}, {"b"}, {"c", "e"}]
    with pytest.raises(
        UserError,
        match=r"data\.fold=2: the case table has the columns fold_0 to fold_1; choose one",
    ):
        split_cases(cases, fold=2)
    with pytest.raises(UserError, match=r"marks none as train; give another data\.fold"):
        split_cases(cases[1:2] + cases[3:])
    with pytest.raises(UserError, match="'b' is marked train and val in the column fold_0"):
        split_cases([*cases, listed("b2", "train", None, patient="b")])


def test_a_case_without_the_columns_of_the_folds_is_in_none_of_them() -> None:
    cases = [listed("a", "train", "val"), listed("b", "val", "train"), case("c", "c")]
    for order in (cases, cases[::-1]):
        assert count_folds(order) == 2
        assert names(split_cases(order, fold=0)) == [{"a"}, {"b"}, set()]
        assert names(split_cases(order, fold=1)) == [{"b"}, {"a"}, set()]
    assert count_folds([]) is None
    assert count_folds([case("c", "c")]) is None
    assert count_folds([case("c", "c", fold=2), case("d", "d", fold=0), case("e", "e")]) == 3


def test_a_fold_that_validates_all_cases_names_its_column() -> None:
    with pytest.raises(
        UserError, match=r"name fewer in the column fold, or give another data\.fold"
    ):
        split_cases([case("a", "a", fold=0), case("b", "b", fold=0)])
