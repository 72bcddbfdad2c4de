"""Questions and answers over UDP: each counts once, and who has no secret is answered nothing."""

import pytest

from scalax._core.channel import datagrams
from scalax._core.channel.datagrams import HEAD, Answerer, Asker

SECRET, OTHER = b'of this run, and long enough', b'of another run, as long as that'


def met(asker: Asker, answerer: Answerer) -> None:
    """The asker learns the answerer's nonce."""
    question, is_new = answerer.question(asker.question(b''))
    assert not is_new
    assert asker.answer(answerer.answer(question, b'')) is None


@pytest.mark.parametrize('secret', [SECRET, b''])
def test_a_question_is_answered(secret: bytes) -> None:
    asker, answerer = Asker(secret), Answerer(secret, 9)
    met(asker, answerer)
    for data in (b'one', b'two'):
        question, is_new = answerer.question(asker.question(data))
        assert is_new and question.data == data
        assert asker.answer(answerer.answer(question, b'answer to ' + data)) == b'answer to ' + data


def test_a_question_that_comes_again_counts_once() -> None:
    asker, answerer = Asker(SECRET), Answerer(SECRET, 9)
    first = asker.question(b'')
    question, is_new = answerer.question(first)
    assert not is_new and asker.answer(answerer.answer(question, b'')) is None
    second, third = asker.question(b'two'), asker.question(b'three')
    answerer.question(third)
    for packet in (second, third):
        with pytest.raises(ValueError, match='a question that came before'):
            answerer.question(packet)
    # What names no nonce, or an old one, is told the new one, and no more.
    assert not answerer.question(first)[1]
    assert not Answerer(SECRET, 9).question(third)[1]


def test_an_answer_is_to_a_question_that_is_open() -> None:
    asker, other, answerer = Asker(SECRET), Asker(SECRET), Answerer(SECRET, 9)
    met(asker, answerer)
    question, _ = answerer.question(asker.question(b'two'))
    answer = answerer.answer(question, b'2')
    assert asker.answer(answer) == b'2'
    for side in (asker, other):  # it comes again, or to somebody else
        with pytest.raises(ValueError, match='an answer to another question'):
            side.answer(answer)
    later = answerer.answer(question._replace(number=9), b'9')
    with pytest.raises(ValueError, match='an answer to another question'):
        asker.answer(later)


def test_a_packet_is_not_sent_back_to_its_side() -> None:
    asker, answerer = Asker(SECRET), Answerer(SECRET, 9)
    packet = asker.question(b'')
    question, _ = answerer.question(packet)
    for read, back in ((asker.answer, packet), (answerer.question, answerer.answer(question, b''))):
        with pytest.raises(ValueError, match='a message of another program'):
            read(back)


def test_askers_are_forgotten_together_with_the_nonce() -> None:
    answerer = Answerer(SECRET, 2)
    askers = [Asker(SECRET) for _ in range(3)]
    for asker in askers:
        met(asker, answerer)
    old = [asker.question(b'a') for asker in askers]
    assert [answerer.question(packet)[1] for packet in old] == [True, True, False]
    assert not any(answerer.question(packet)[1] for packet in old)  # of the nonce before
    for asker in askers[:2]:
        met(asker, answerer)
        assert answerer.question(asker.question(b'b'))[1]


@pytest.mark.parametrize('packet', [b'', b'GET / HTTP/1.1', bytes(HEAD - 1), bytes(HEAD), bytes(HEAD + 9)])
def test_what_nobody_has_signed(packet: bytes) -> None:
    for read in (Asker(SECRET).answer, Answerer(SECRET, 9).question):
        with pytest.raises(ValueError, match=r'^a message of another program, or of one .* another secret$'):
            read(packet)


def test_another_secret() -> None:
    with pytest.raises(ValueError, match='another secret'):
        Answerer(SECRET, 9).question(Asker(OTHER).question(b''))
    message = datagrams.unpacked(OTHER, b'asks', Asker(OTHER).question(b'data'))
    assert message.data == b'data' and message.number == 1
