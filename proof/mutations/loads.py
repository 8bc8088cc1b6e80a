"""Rules of loads: their reports to the engine, and the gates of the steps that read them."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    Append,
    DropOperand,
    MoveAfter,
    Never,
    Rewrite,
    SetOperand,
    Value,
)
from proof.mutations.reasons import COUNT, GIVES_UP, LOOKS, MESSAGE, QUEUE
from proof.mutations.tables import Change, Equivalent, Exempt, Mutation

MUTATIONS = (
    Mutation(
        name="load-is-whole-in-the-window",
        hazard="H15",
        change=Value("len(blocks)"),
        consequence="a load leaves layers out of blocks to which these layers attend",
        needs=frozenset({"offload", "window"}),
    ),
    # ------------------------------------------------------------------ reports of loads to the engine
    Mutation(
        name="load-is-ready-after-its-last-slice-was-submitted",
        hazard="H5",
        change=MoveAfter("submitted-copy-leaves-its-queue"),
        consequence="a step joins a load that has no fences yet for its last layers",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="load-is-ready-after-its-last-piece-began",
        hazard="H5",
        at="load-is-submitted",
        change=DropOperand("all_begun"),
        consequence="a step joins a load before its last pieces were submitted",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="submitted-load-is-reported",
        hazard="H26",
        consequence="a request waits forever for a finished load",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="ready-load-becomes-an-event",
        hazard="H26",
        consequence="a request waits forever for a finished load",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="ended-load-is-settled",
        hazard="H22",
        consequence="blocks are never released after a load",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="failed-load-is-reported",
        hazard="H9",
        consequence="a request never learns that its load failed",
        needs=frozenset({"failing_copy", "offload"}),
    ),
    Mutation(
        name="load-failure-is-known-with-its-step",
        hazard="H9",
        change=Never(),
        consequence="results of a step with a failed load are used, because the offload worker has not reported the "
        "failure yet",
        needs=frozenset({"failing_load", "layer_groups", "offload"}),
    ),
    Mutation(
        name="load-fails-with-any-of-its-slices",
        hazard="H15",
        change=Rewrite("self.submitted.fences", "self.submitted.groups[-1].fences"),
        consequence="results of a step are used although only the last layers of its load succeeded",
        needs=frozenset({"failing_load", "layer_groups", "offload"}),
    ),
    # ------------------------------------------------------------------ gates
    Mutation(
        name="step-waits-for-its-own-loads",
        hazard="H5",
        change=Append("if len(batch.rows) > 1:\n    return LayerGates()"),
        consequence="a step of several rows does not wait for its loads",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="each-layer-waits-for-its-own-copy",
        hazard="H5",
        at="layer-gates",
        change=Rewrite("(group).fences", "(0).fences"),
        consequence="later layers are read as soon as the first ones are loaded",
        needs=frozenset({"offload"}),
    ),
    Mutation(
        name="layer-waits-for-its-last-slice",
        hazard="H5",
        at="layer-gates",
        change=Rewrite("(group).fences[-1]", "(group).fences[0]"),
        consequence="a layer is read as soon as its first slice is loaded",
        needs=frozenset({"offload"}),
    ),
)

_VALUE = "a value"
_FOR_SPEED = "for speed: a step waits for its loads in any case"

_GONE = "the fault needs an earlier store that evicts source blocks of a load between the load's plan and its execution"

EQUIVALENT = (
    Equivalent(
        Mutation(
            name="head-arrives-within-the-deadline",
            hazard="H26",
            change=Never(),
            consequence="a request waits for more blocks than arrive within the deadline",
            needs=frozenset({"slow_tier"}),
        ),
        "the wait ends at the deadline anyway, and the request computes what has not arrived: only time is lost",
        noticed_by="offload/test_costs.py::test_a_load_longer_than_the_deadline_is_cut_where_the_deadline_ends",
    ),
    Equivalent(
        Mutation(
            name="layer-waits-for-all-pieces",
            hazard="H5",
            at="layer-gates",
            change=DropOperand("before"),
            consequence="blocks of a load are read before they are loaded, except those of its last piece",
            needs=frozenset({"offload"}),
        ),
        "each slice waits for the one before it, so the last piece ends after all others: see "
        "slice-waits-for-the-one-before",
        noticed_by="offload/test_load_gates.py::test_a_layer_waits_for_the_last_slice_of_earlier_pieces_and_of_its_group",
    ),
    Equivalent(
        Mutation(
            name="layer-waits-for-the-last-slice-of-each-piece",
            hazard="H5",
            at="layer-gates",
            change=Rewrite("fences[-1] for", "fences[0] for"),
            consequence="a piece of a load counts as loaded when its first slice is loaded",
            needs=frozenset({"offload"}),
        ),
        "the fault needs a last piece that ends before another piece's last slice, which was submitted before it",
        noticed_by="offload/test_load_gates.py::test_a_layer_waits_for_the_last_slice_of_earlier_pieces_and_of_its_group",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="missing-load-is-settled",
            hazard="H22",
            consequence="blocks are never released if the source of their load is gone",
            needs=frozenset({"offload", "reset"}),
        ),
        _GONE,
        noticed_by="offload/test_store_and_load.py::test_a_load_of_evicted_blocks_fails",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="missing-load-is-reported",
            hazard="H26",
            consequence="a request whose blocks were evicted before its load waits forever",
            needs=frozenset({"offload", "reset"}),
        ),
        _GONE,
        noticed_by="offload/test_store_and_load.py::test_a_load_of_evicted_blocks_fails",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="dropped-load-is-settled",
            hazard="H22",
            consequence="blocks and slots of loads that a close dropped are never released",
            needs=frozenset({"close", "offload"}),
        ),
        "the fault needs a close in the turn in which the offload worker receives the load",
        noticed_by="offload/test_worker.py::test_close_releases_a_load_of_which_no_piece_has_begun",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="dropped-load-settles-once",
            hazard="H21",
            change=Always(),
            consequence="a failed load releases its slots a second time at the close",
            needs=frozenset({"close", "failing_copy", "offload"}),
        ),
        "the fault needs a close in the turn in which the offload worker sees a piece fail, while other loads fill "
        "its lane",
        noticed_by="offload/test_worker.py::test_close_does_not_end_a_failed_load_a_second_time",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="load-is-ready-after-all-pieces-were-submitted",
            hazard="H5",
            at="load-is-submitted",
            change=DropOperand("submitted"),
            consequence="a step joins a load that has no fences yet for some of its pieces",
            needs=frozenset({"offload"}),
        ),
        "nothing ends between two polls of the simulated offload worker, so the pieces of a load are submitted in "
        "order",
        noticed_by="offload/test_pieces.py::test_a_load_is_ready_once_all_pieces_were_submitted_in_any_order",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="step-waits-only-for-its-own-loads",
            hazard="H5",
            at="loads-of-a-step",
            change=DropOperand(1),
            consequence="a step waits for loads of requests that are not in it",
            needs=frozenset({"offload"}),
        ),
        "the step waits too long, but this cannot cause a deadlock",
        noticed_by="offload/test_store_and_load.py::test_each_layer_of_a_step_waits_for_the_loads_of_its_own_requests_only",
    ),
    Equivalent(
        Mutation(
            name="load-without-fences-gates-no-step",
            hazard="H5",
            at="loads-of-a-step",
            change=DropOperand("submitted"),
            consequence="a step asks for fences that a load does not have yet",
            needs=frozenset({"offload"}),
        ),
        "a request joins a step when its load has all its fences: see load-has-its-fences-before-its-first-step",
        noticed_by="offload/test_loads.py::test_a_load_that_is_not_ready_has_no_fences_for_a_step",
    ),
    Equivalent(
        Mutation(
            name="settled-is-read-before-the-events",
            hazard="H9",
            change=MoveAfter("transfer-events-are-taken"),
            consequence="a load's record is deleted before its last message arrives",
            needs=frozenset({"offload"}),
        ),
        "the simulated offload worker takes no turn while the engine polls",
        noticed_by="offload/test_loads.py::test_a_load_that_ends_during_a_poll_is_reported_by_the_next_poll",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="failed-load-is-not-reported-as-ready",
            hazard="H9",
            at="load-is-submitted",
            change=DropOperand(2),
            consequence="a request joins a step although its load has failed",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the step's results are dropped: see load-failure-is-known-with-its-step",
        noticed_by="offload/test_pieces.py::test_load_with_a_failed_piece_is_never_reported_as_ready",
    ),
    Equivalent(
        Mutation(
            name="load-failure-is-reported-once",
            hazard="H9",
            change=DropOperand("reported"),
            consequence="the failure of a load is reported repeatedly",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the first report preempts the request, and later ones belong to an earlier epoch",
        noticed_by="offload/test_loads.py::test_failed_load_is_reported_once_by_worker_or_engine",
    ),
    Equivalent(
        Mutation(
            name="load-failure-is-not-reported-again-at-the-end",
            hazard="H9",
            change=Always(),
            consequence="the failure of a load is reported twice",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the first report preempts the request, and later ones belong to an earlier epoch",
        noticed_by="offload/test_loads.py::test_failed_load_is_reported_once_by_worker_or_engine",
    ),
    Equivalent(
        Mutation(
            name="missing-source-fails-the-load",
            hazard="H15",
            change=SetOperand(0, "not source_ids"),
            consequence="a load copies the rest if a part was evicted since it was planned",
            needs=frozenset({"offload"}),
        ),
        _GONE,
        noticed_by="offload/test_store_and_load.py::test_a_load_of_evicted_blocks_fails",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="state-covers-the-planned-tokens",
            hazard="H15",
            change=Never(),
            consequence="a request continues from a state of another number of tokens",
            needs=frozenset({"offload", "states"}),
        ),
        "no fault that is drawn gives a stored state another number of tokens: this check is for defects in other code",
        noticed_by="engine/test_offload.py::test_a_recurrent_state_of_other_tokens_is_a_miss_and_is_dropped",
    ),
    Equivalent(
        Mutation(
            name="load-settles-after-its-last-piece-began",
            hazard="H10",
            at="load-is-settled",
            change=DropOperand(1),
            consequence="a load counts as ended between two pieces, and its slots are free",
            needs=frozenset({"offload"}),
            also=(
                Change(
                    "load-settles-once",
                    Rewrite(".settled", ".settled or job.job_id not in self._context.unsettled._unsettled"),
                ),
            ),
        ),
        "the fault needs another copy that runs between two pieces of the load",
        noticed_by="offload/test_pieces.py::test_a_load_with_remaining_pieces_keeps_its_host_slots",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="failed-load-begins-no-more-pieces",
            hazard="H10",
            change=Always(),
            consequence="a failed load that has released its blocks still writes them",
            needs=frozenset({"failing_copy", "offload"}),
            also=(
                Change(
                    "load-settles-once",
                    Rewrite(".settled", ".settled or job.job_id not in self._context.unsettled._unsettled"),
                ),
            ),
        ),
        "the fault needs another copy that runs between two pieces of the load",
        noticed_by="offload/test_pieces.py::test_a_load_with_a_failed_piece_submits_no_more_pieces",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="load-fails-with-any-of-its-pieces",
            hazard="H15",
            change=Value("copy.failure if job.all_begun else None"),
            consequence="a load with a failed piece continues, and its request does not learn of the failure",
            needs=frozenset({"failing_copy", "offload"}),
        ),
        "the fault needs another copy that runs between two pieces of the load",
        noticed_by="offload/test_pieces.py::test_a_load_with_a_failed_piece_submits_no_more_pieces",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="changed-block-is-not-loaded",
            hazard="H9",
            change=Never(),
            consequence="a request uses KV whose bytes changed in host memory",
            needs=frozenset({"offload", "self_check"}),
        ),
        "no schedule changes bytes in host memory",
        noticed_by="offload/test_checksums.py::test_a_block_with_a_flipped_bit_fails_its_load_and_is_counted",
        unreached=True,
    ),
    Equivalent(
        Mutation(
            name="refused-load-is-settled",
            hazard="H22",
            consequence="the slots and device blocks of a load that was refused stay in use forever",
            needs=frozenset({"offload", "self_check"}),
        ),
        "no schedule changes bytes in host memory",
        noticed_by="offload/test_checksums.py::test_a_block_with_a_flipped_bit_fails_its_load_and_is_counted",
        unreached=True,
    ),
)

EXEMPT = (
    Exempt("_Load.gates", ("submitted",), "see load-without-fences-gates-no-step"),
    Exempt("_Load.share_left", ("submitted", "submitted"), _FOR_SPEED),
    Exempt("_Load.seconds_left", ("submitted", "failure", "submitted"), _FOR_SPEED),
    Exempt("OffloadConnector.gates", ("gates",), "see each-layer-waits-for-its-own-copy"),
    Exempt("OffloadConnector.seconds_left", ("epoch",), _FOR_SPEED),
    Exempt("OffloadConnector.poll", ("take",), MESSAGE),
    Exempt("OffloadConnector.poll", ("submitted", "reported"), _VALUE),
    Exempt("OffloadConnector.failed_loads", ("reported",), _VALUE),
    Exempt("OffloadConnector.flush", ("abandoned",), GIVES_UP),
    Exempt("OffloadConnector.flush", ("poll",), LOOKS),
    Exempt(
        "OffloadConnector.close",
        ("abandoned",),
        "there is no stream to submit to: tests/offload/test_worker.py closes with commands that were not received",
    ),
    Exempt(
        "OffloadConnector.close",
        ("failure",),
        "a worker that failed takes no more turns: tests/offload/test_worker.py has one",
    ),
    Exempt("OffloadConnector.close", ("poll",), LOOKS),
    Exempt("Part.bytes_left", ("poll",), _FOR_SPEED),
    Exempt("Loads.submit", ("abandoned",), "decides which reason is counted"),
    Exempt("Loads.submit", ("release", "forget"), "see state-covers-the-planned-tokens"),
    Exempt("Loads.begin_piece", ("failure",), QUEUE),
    Exempt("Loads._begin_piece", ("begun",), COUNT),
    Exempt("Loads._begin_piece", ("add",), QUEUE),
    Exempt("Loads._refuse", ("failure", "forget"), "see changed-block-is-not-loaded"),
    Exempt("Loads.submitted", ("submitted",), COUNT),
    Exempt("Loads.submitted", ("failure", "failure"), "see failed-load-is-not-reported-as-ready"),
    Exempt("Loads.end", ("failure",), "decides whether a copy is measured"),
    Exempt("Loads.end", ("failure",), "decides which of several failures is kept"),
    Exempt("Loads._settle", ("ended", "failure"), "see failed-load-is-reported"),
    Exempt("Loads.drop", ("failure",), "see dropped-load-is-settled"),
    Exempt("LoadJob.all_begun", ("begun",), "a query; rules above cover its callers"),
)
