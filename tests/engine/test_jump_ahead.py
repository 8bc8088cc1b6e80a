"""Jump-ahead: what a grammar leaves no choice about is drafted, so an answer takes fewer steps; its tokens are those of
an engine without drafts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_rig import Reply, Rig, prompts, serving

from proof.tiny_models import tiny_model_dir
from proof.toy import ToyDraftHead, ToyModel, ToyProposer
from proof.toy_grammar import ToyGrammar, ToyGrammars
from sidestream import LLM, SamplingParams, SpeculativeConfig, StructuredOutputs
from sidestream.ops import Ops
from sidestream.runner.state import DecodeState
from sidestream.types import Forced

# Runs of eight free and of eight forced tokens.
RUNS = StructuredOutputs(regex="3 1000 0 8")
FREE = StructuredOutputs(regex="3 1000")
ALWAYS = SpeculativeConfig("grammar", max_drafts=3, adaptive=False)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 30.0, "seed": 7, "ignore_eos": True}


def jumping(speculative: SpeculativeConfig | None = ALWAYS, **options: Any) -> Any:
    model = options.setdefault("model", ToyModel())
    return serving(**{"grammars": ToyGrammars(model.vocab_size), "blocks": 96, "speculative": speculative, **options})


def ask(rig: Rig, asked: Sequence[Sequence[int]], form: StructuredOutputs = RUNS, **params: Any) -> list[Reply]:
    replies = [rig.submit(prompt, 48, structured_outputs=form, **params) for prompt in asked]
    return [reply.wait() for reply in replies]


def counts(rig: Rig, proposer: str = "grammar") -> tuple[int, int]:
    return rig.counted("draft_tokens_total", proposer), rig.counted("accepted_tokens_total", proposer)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_tokens_and_log_probabilities_are_those_without_drafts(params: dict[str, Any], asynchronous: bool) -> None:
    asked, params = prompts(1, 6, longest=40), {**params, "logprobs": 2, "n": 2}
    with jumping(None) as rig:
        plain, plain_steps = ask(rig, asked, **params), rig.engine.loop.num_steps
    with jumping(asynchronous=asynchronous) as rig:
        jumped, steps = ask(rig, asked, **params), rig.engine.loop.num_steps
        drafted, accepted = counts(rig)
    for index in range(2):
        assert [reply.token_ids(index) for reply in jumped] == [reply.token_ids(index) for reply in plain]
        assert [reply.logprobs(index) for reply in jumped] == [reply.logprobs(index) for reply in plain]
    assert drafted == accepted > 12 * 12  # of 24 forced tokens of each answer
    assert steps < 0.8 * plain_steps


def test_a_preempted_answer_jumps_on_where_it_was() -> None:
    asked = prompts(3, 4, longest=20)
    with jumping(None) as rig:
        plain = ask(rig, asked, **GREEDY)
    with jumping(blocks=20) as rig:
        jumped = ask(rig, asked, **GREEDY)
        drafted, accepted = counts(rig)
        assert rig.counted("preemptions_total") > 0
    assert [reply.token_ids() for reply in jumped] == [reply.token_ids() for reply in plain]
    assert drafted and accepted >= drafted - 3 * 4  # a preemption drops results, but spoils no draft


@pytest.mark.parametrize("own", [False, True])
def test_wrong_forced_tokens_cost_steps_and_no_token(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """As if the model cut the text into other tokens than the grammar. Then the proposer's own drafts, if there are
    any, are accepted with their own masks.
    """
    asked, model = prompts(2, 6), ToyModel()
    with jumping(None, model=model) as rig:
        plain = ask(rig, asked, FREE, **GREEDY)
    monkeypatch.setattr(ToyGrammar, "forced", lambda self, known, most: (5, 6, 7, 8, 9, 10, 11)[:most])
    proposer = {"proposer": ToyProposer(ToyDraftHead(model, width=3))} if own else {}
    with jumping(model=model, **proposer) as rig:
        wrong = ask(rig, asked, FREE, **GREEDY)
        drafted, accepted = counts(rig)
        assert not own or counts(rig, "toy")[1] > 60
        assert own or rig.engine.parts.scheduler._policy._forced < 0.3
    assert [reply.token_ids() for reply in wrong] == [reply.token_ids() for reply in plain]
    assert 0 <= accepted < 0.1 * drafted or own


def test_answers_beside_forced_ones_have_the_drafts_of_the_proposer_alone() -> None:
    """In the same slot, one after the other."""
    model = ToyModel()
    asked, accepted = prompts(4, 6), dict[bool, list[tuple[int, int]]]()
    for between in (False, True):
        with jumping(model=model, proposer=ToyProposer(ToyDraftHead(model, width=3)), max_running=1) as rig:
            accepted[between] = []
            for prompt in asked:
                if between:
                    ask(rig, [prompt], **GREEDY)
                before = counts(rig, "toy")
                rig.expect(rig.submit(prompt, 40), prompt, 40)
                accepted[between].append(
                    tuple(now - then for now, then in zip(counts(rig, "toy"), before, strict=True))
                )
            assert (counts(rig)[0] > 0) == between
    assert accepted[True] == accepted[False]


def test_a_step_with_forced_drafts_alone_does_not_wait_for_its_pass() -> None:
    """The host knows these drafts, so it makes their masks beside the pass."""
    with jumping() as rig:
        executor, read = rig.engine.parts.executor, list[Any]()
        executor.drafts_of = read.append  # type: ignore[method-assign, assignment]
        (reply,) = ask(rig, [[5, 6]], **GREEDY)
        assert len(reply.token_ids()) == 48 and counts(rig)[0] > 9
    assert not read


def test_without_forced_tokens_no_step_has_drafts_or_another_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, name in ((Ops, "take_forced"), (DecodeState, "force")):
        monkeypatch.setattr(kind, name, lambda *_: pytest.fail("it was called"))
    with jumping(SpeculativeConfig("grammar", max_drafts=3)) as rig:
        asked = prompts(5, 4)
        replies = [rig.submit(prompt, 20) for prompt in asked]
        for reply, prompt in zip(replies, asked, strict=True):
            rig.expect(reply, prompt, 20)
        ask(rig, asked, FREE, **GREEDY)
        assert counts(rig) == (0, 0)


def test_an_engine_without_drafts_asks_no_grammar_what_it_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyGrammar, "forced", lambda self, known, most: pytest.fail("it was asked"))
    with jumping(None) as rig:
        assert len(ask(rig, [[5, 6]], **GREEDY)[0].token_ids()) == 48
    with jumping() as rig:
        assert len(ask(rig, [[5, 6]], max_drafts=0, **GREEDY)[0].token_ids()) == 48


def test_forced_tokens_count_behind_their_own_beginning_only() -> None:
    forced = Forced(3, (7, 8, 9))
    assert forced.after([1, 2, 3]) == (7, 8, 9)
    assert forced.after([1, 2, 3, 7, 8]) == (9,)
    assert forced.after([1, 2, 3, 7, 9]) == ()
    assert forced.after([1, 2, 3, 7, 8, 9, 1]) == ()
    assert Forced(3, (7,)).after([1, 2]) == ()


def test_an_answer_to_a_schema_with_long_keys_takes_fewer_steps(tmp_path: Path) -> None:
    """With llguidance, and a model that has a token for each byte."""
    directory = tiny_model_dir("llama", tmp_path, seed=1)
    keys = {f"the_name_of_the_{name}": {"enum": [1, 2, 3]} for name in ("customer", "account")}
    schema = {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}
    form = StructuredOutputs(json=json.dumps(schema), disable_any_whitespace=True)
    asked = ["The whale " * 12, "The ship"]
    params = [
        SamplingParams(max_tokens=90, logprobs=1, structured_outputs=form, n=2, temperature=temperature, seed=3)
        for temperature in (0.0, 1.0)
    ]
    answers, steps, accepted = dict[str, list[Any]](), dict[str, float](), dict[str, float]()
    for name in ("plain", "grammar", "ngram"):
        options = {} if name == "plain" else {"speculative": SpeculativeConfig(name, adaptive=False)}
        with LLM(directory, kv_memory="8MiB", compute_threads=1, chunk_tokens=32, **options) as llm:
            outputs = llm.generate(asked * 2, [each for each in params for _ in asked])
            answers[name] = [each for output in outputs for each in output.completions]
            steps[name] = llm.metrics.value("steps_total")
            accepted[name] = llm.metrics.value("accepted_tokens_total", "grammar")
    assert all(json.loads(answer.text).keys() == keys.keys() for answer in answers["plain"])
    for name in ("grammar", "ngram"):
        assert [one.token_ids for one in answers[name]] == [one.token_ids for one in answers["plain"]]
        for one, other in zip(answers[name], answers["plain"], strict=True):
            pairs = zip(one.logprobs, other.logprobs, strict=True)
            # A pass over several positions rounds differently from a pass over one.
            assert all(ours.logprob == pytest.approx(theirs.logprob, abs=1e-4) for ours, theirs in pairs)
        assert steps[name] < 0.5 * steps["plain"]
    # Each key has at least 24 forced bytes behind its first ones.
    assert accepted["grammar"] >= 8 * 2 * 18 and not accepted["plain"]
