"""What is expected of the passes to come, by those that were."""

from natgrad.habit import Caution, Expected


def test_what_is_expected_is_what_mostly_came():
    expected = Expected(["a"])
    assert expected.totals == {"a": -1}
    assert not expected.last("a")
    for count, usual in [(3, 3), (1, 3), (1, 1), (0, 1), (0, 1), (0, 0)]:
        expected.counts["a"] = count
        expected.learn()
        expected.begin()
        assert expected.totals == {"a": usual}, count
        assert expected.counts == {"a": 0}


def test_the_last_gradient_is_told_before_and_when_it_comes():
    expected = Expected(["a"])
    expected.counts["a"] = 2
    expected.learn()
    expected.begin()
    told = []
    for _ in range(3):
        told.append((expected.last("a"), expected.complete("a")))
        expected.counts["a"] += 1
    assert told == [(False, False), (True, False), (False, True)]


def test_caution_grows_with_every_wrong_guess_and_fades_with_right_ones():
    caution, pauses = Caution(), []
    for _ in range(8):
        caution.learn(wrong=True)
        pause = 0
        while caution.waits:
            caution.learn(wrong=False)
            pause += 1
        pauses.append(pause)
    assert pauses == [1, 3, 7, 15, 31, 63, 64, 64]
    for _ in range(7):
        caution.learn(wrong=False)
    caution.learn(wrong=True)
    caution.learn(wrong=False)
    assert not caution.waits
