"""Structured output: each token obeys a grammar that depends on all tokens before it, whatever else happens to its
request; and other requests get the tokens that they would get alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine_rig import Reply, Rig, prompts, serving

from proof.toy import ToyDraftHead, ToyModel, ToyProposer
from proof.toy_grammar import ToyGrammar, ToyGrammars
from sidestream.config import SpeculativeConfig, StructuredOutputs
from sidestream.errors import InvariantError, RequestRejected
from sidestream.types import NO_TOKEN_LEFT

LONG = StructuredOutputs(regex="2 1000")


def masked(**options: Any) -> Any:
    model = options.setdefault("model", ToyModel())
    return serving(grammars=ToyGrammars(model.vocab_size), **options)


def ask(rig: Rig, prompt: Sequence[int], count: int = 20, **params: Any) -> Reply:
    return rig.submit(prompt, count, structured_outputs=LONG, ignore_eos=True, temperature=0.0, **params)


def expected(model: ToyModel, prompt: Sequence[int], count: int) -> list[int]:
    """The model's best token if it is allowed, else the first that is: all others are equally likely."""
    grammar, answer = ToyGrammar(model.vocab_size, period=2, length=1000), list[int]()
    for _ in range(count):
        best, allowed = model.expected([*prompt, *answer], 1)[0], grammar.allowed(answer)
        answer.append(best if allowed[best] else int(allowed.argmax()))
    return answer


@pytest.mark.parametrize(("asynchronous", "params"), [(True, {}), (False, {"logprobs": 1})])
def test_answers_obey_their_grammar_beside_answers_without_one(asynchronous: bool, params: dict[str, int]) -> None:
    asked = prompts(1, 12)
    with masked(blocks=96, asynchronous=asynchronous) as rig:
        with_grammar = [ask(rig, prompt, **params) for prompt in asked[::2]]
        plain = [rig.submit(prompt, 20) for prompt in asked[1::2]]
        for reply, prompt in zip(with_grammar, asked[::2], strict=True):
            assert reply.wait().token_ids() == expected(rig.model, prompt, 20)
            assert reply.token_ids() != rig.model.expected(prompt, 20)
        for reply, prompt in zip(plain, asked[1::2], strict=True):
            rig.expect(reply, prompt, 20)


@pytest.mark.parametrize("drafts", [3, 2])
def test_drafts_obey_the_grammar_and_are_still_accepted(drafts: int) -> None:
    """Also if all rows of a step have fewer drafts than the engine allows: the host reads each row's own."""
    model = ToyModel()
    speculative = SpeculativeConfig(max_drafts=3, adaptive=False)
    with masked(
        model=model, blocks=96, proposer=ToyProposer(ToyDraftHead(model, width=3)), speculative=speculative
    ) as rig:
        asked = prompts(2, 8)
        replies = [
            ask(rig, prompt, 40, max_drafts=drafts) if number % 3 else rig.submit(prompt, 40, max_drafts=drafts)
            for number, prompt in enumerate(asked)
        ]
        for number, (reply, prompt) in enumerate(zip(replies, asked, strict=True)):
            assert reply.wait().token_ids() == (expected if number % 3 else lambda model, *of: model.expected(*of))(
                model, prompt, 40
            )
        assert rig.counted("accepted_tokens_total", "toy") > 60


def test_a_preempted_answer_goes_on_in_its_grammar() -> None:
    asked = prompts(3, 4, longest=20)
    with masked(blocks=16) as rig:
        replies = [ask(rig, prompt, 30) for prompt in asked]
        for reply, prompt in zip(replies, asked, strict=True):
            assert reply.wait().token_ids() == expected(rig.model, prompt, 30)
        assert rig.counted("preemptions_total") > 0


def test_samples_of_one_request_follow_their_own_answers() -> None:
    prompt = prompts(4, 1)[0]
    with masked(blocks=96) as rig:
        reply = rig.submit(prompt, 12, structured_outputs=LONG, n=3, temperature=100.0, seed=5, ignore_eos=True).wait()
        answers = [reply.token_ids(index) for index in range(3)]
        assert len(set(map(tuple, answers))) == 3
        for answer in answers:
            assert all((token + sum(answer[:at])) % 2 for at, token in enumerate(answer))


def test_drafts_are_read_only_of_steps_that_have_some() -> None:
    """Other steps depend on drafts, too: on those of the step before. The host does not wait for their pass."""
    model = ToyModel()
    with masked(
        model=model,
        blocks=96,
        proposer=ToyProposer(ToyDraftHead(model, width=3)),
        speculative=SpeculativeConfig(max_drafts=3, adaptive=False),
    ) as rig:
        executor, read = rig.engine.parts.executor, list[bool]()
        drafts_of, sample = executor.drafts_of, executor.sample
        without: list[bool] = []

        def reading(step: Any) -> Any:
            read.append(any(step.batch.columns.drafts))
            return drafts_of(step)

        def sampling(step: Any, *more: Any) -> Any:
            without.append(step.batch.speculates and not any(step.batch.columns.drafts))
            return sample(step, *more)

        executor.drafts_of, executor.sample = reading, sampling  # type: ignore[method-assign]
        for number, prompt in enumerate(prompts(8, 6)):
            assert ask(rig, prompt, 9 + number).wait().token_ids() == expected(model, prompt, 9 + number)
    assert any(without) and all(read) and read


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_answer_ends_with_the_last_token_of_its_grammar(drafts: int) -> None:
    model = ToyModel()
    options: dict[str, Any] = {"model": model, "blocks": 96}
    if drafts:
        options["proposer"] = ToyProposer(ToyDraftHead(model, width=drafts))
        options["speculative"] = SpeculativeConfig(max_drafts=drafts, adaptive=False)
    with masked(**options) as rig:
        for number, prompt in enumerate(prompts(5, 6)):
            form = StructuredOutputs(regex=f"50 {4 + number}")
            reply = rig.submit(prompt, 20, structured_outputs=form, ignore_eos=True, temperature=0.0).wait()
            assert (len(reply.token_ids()), reply.reason) == (4 + number, "stop")
            assert reply.text() == rig.tokenizer.decode(reply.token_ids())


def test_a_grammar_that_fails_ends_its_answer_with_an_error_alone() -> None:
    with masked(blocks=96) as rig:
        prompt, other = prompts(6, 2)
        failing = rig.submit(
            prompt, 20, structured_outputs=StructuredOutputs(regex="2 9 3"), ignore_eos=True, temperature=0.0
        )
        good = ask(rig, other)
        assert (failing.reason, failing.error) == ("error", "a limit was reached")
        assert good.wait().token_ids() == expected(rig.model, other, 20)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(
    ("options", "before"),
    [
        ({"allowed_token_ids": (1,)}, [1]),
        ({"allowed_token_ids": (1, 2), "stop_token_ids": (2,), "min_tokens": 5}, [1]),
    ],
)
def test_an_answer_whose_options_forbid_every_token_ends_with_that_reason(
    drafts: int, options: dict[str, Any], before: list[int]
) -> None:
    model = ToyModel()
    more: dict[str, Any] = {}
    if drafts:
        more["proposer"] = ToyProposer(ToyDraftHead(model, width=drafts))
        more["speculative"] = SpeculativeConfig(max_drafts=drafts, adaptive=False)
    with masked(model=model, blocks=96, **more) as rig:
        prompt, other = prompts(6, 2)
        stuck, good = ask(rig, prompt, **options), ask(rig, other)
        assert (stuck.wait().token_ids(), stuck.reason, stuck.error) == (before, "error", NO_TOKEN_LEFT)
        assert good.wait().token_ids() == expected(rig.model, other, 20)


def test_the_pass_is_launched_before_the_last_step_is_committed() -> None:
    order: list[str] = []
    with masked() as rig:
        loop, executor = rig.engine.loop, rig.engine.parts.executor
        launch, sample, commit = executor.launch, executor.sample, loop._commit

        def launching(*args: Any, **options: Any) -> Any:
            order.append("launch")
            return launch(*args, **options)

        def sampling(*args: Any) -> Any:
            order.append("sample")
            return sample(*args)

        def committing(step: Any) -> None:
            order.extend(["commit"] if step is not None else [])
            commit(step)

        executor.launch, executor.sample, loop._commit = launching, sampling, committing  # type: ignore[method-assign]
        ask(rig, [5], 4).wait()
    assert order[:8] == ["launch", "sample", "launch", "commit", "sample", "launch", "commit", "sample"]


def test_masks_and_drafts_are_refused_while_a_step_uses_them() -> None:
    with masked() as rig:
        reply = ask(rig, [5], 3).wait()
        executor, hold = rig.engine.parts.executor, rig.hold("compute")
        assert executor._masks is not None and executor._masks._last_use is not None
        reading = rig.device._streams["compute"].submit(lambda: None)
        executor._masks.used_until(reading)
        with pytest.raises(InvariantError, match="masks are written before"):
            executor.open_masks(1)
        entry = executor._mailbox.take_entry()
        with pytest.raises(InvariantError, match="drafts were read before"):
            executor._mailbox.read_drafts(entry, 1, 0, reading)
        entry.lease.release()
        hold.release()
        assert reply.reason == "length"


def test_a_grammar_that_cannot_be_compiled_is_refused_before_anything_is_taken() -> None:
    with masked() as rig:
        with pytest.raises(RequestRejected, match=r"structured_outputs\.regex is 'two'"):
            rig.submit([5], structured_outputs=StructuredOutputs(regex="two"))
        rig.check_idle()
    with serving() as rig, pytest.raises(RequestRejected, match="no tokenizer"):
        rig.submit([5], structured_outputs=LONG)


def test_bad_words_and_allowed_ids_need_no_tokenizer() -> None:
    prompt = prompts(7, 1)[0]
    with serving() as rig:
        plain = rig.model.expected(prompt, 8)
        reply = rig.submit(prompt, 8, temperature=0.0, bad_word_ids=((plain[2], plain[3]),)).wait()
        assert reply.token_ids()[:3] == plain[:3] and reply.token_ids()[3] != plain[3]
        assert set(rig.submit(prompt, 8, allowed_token_ids=(5, 6)).wait().token_ids()) <= {5, 6}
        with pytest.raises(RequestRejected, match="allowed_token_ids has token id 97"):
            rig.submit(prompt, 8, allowed_token_ids=(97,))
