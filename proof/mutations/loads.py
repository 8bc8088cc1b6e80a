"""Rules of loads: their reports to the engine, and the gates of the steps that read them."""

from __future__ import annotations

from proof.mutations.operators import (
    Always,
    DropOperand,
    MoveAfter,
    Never,
    Rewrite,
    SetOperand,
    Value,
)
from proof.mutations.reasons import COUNT, GIVES_UP, LOOKS, MESSAGE, QUEUE
from proof.mutations.tables import Change, Exempt, Fault

MUTATIONS = (
    Fault("H15", "a load leaves layers out of blocks to which these layers attend").without(
        "load-is-whole-in-the-window", Value("len(blocks)"), needs={"offload", "window"}
    ),
    # ------------------------------------------------------------------ reports of loads to the engine
    Fault("H5", "a step joins a load that has no fences yet for its last layers").without(
        "load-is-ready-after-its-last-slice-was-submitted",
        MoveAfter("submitted-copy-leaves-its-queue"),
        needs={"offload"},
    ),
    Fault("H5", "a step joins a load before its last pieces were submitted").without(
        "load-is-ready-after-its-last-piece-began", DropOperand("all_begun"), at="load-is-submitted", needs={"offload"}
    ),
    Fault("H26", "a request waits forever for a finished load").without(
        "submitted-load-is-reported", needs={"offload"}
    ),
    Fault("H26", "a request waits forever for a finished load").without(
        "ready-load-becomes-an-event", needs={"offload"}
    ),
    Fault("H22", "blocks are never released after a load").without("ended-load-is-settled", needs={"offload"}),
    Fault("H9", "a request never learns that its load failed").without(
        "failed-load-is-reported", needs={"failing_copy", "offload"}
    ),
    Fault(
        "H9",
        "results of a step with a failed load are used, because the offload worker has not reported the failure yet",
    ).without("load-failure-is-known-with-its-step", Never(), needs={"failing_load", "layer_groups", "offload"}),
    Fault("H15", "results of a step are used although only the last layers of its load succeeded").without(
        "load-fails-with-any-of-its-slices",
        Rewrite("self.submitted.fences", "self.submitted.groups[-1].fences"),
        needs={"failing_load", "layer_groups", "offload"},
    ),
    Fault("H15", "a load copies the rest if a part was evicted since it was planned").without(
        "missing-source-fails-the-load", SetOperand(0, "not slots.ids"), needs={"offload"}
    ),
    # ------------------------------------------------------------------ gates
    Fault("H5", "a step does not wait for its loads").without(
        "step-waits-for-its-own-loads", Always(), needs={"offload"}
    ),
    Fault("H5", "later layers are read as soon as the first ones are loaded").without(
        "each-layer-waits-for-its-own-copy",
        Rewrite("(group).fences", "(0).fences"),
        at="layer-gates",
        needs={"offload"},
    ),
    Fault("H5", "a layer is read as soon as its first slice is loaded").without(
        "layer-waits-for-its-last-slice",
        Rewrite("(group).fences[-1]", "(group).fences[0]"),
        at="layer-gates",
        needs={"offload"},
    ),
)

_VALUE = "a value"
_FOR_SPEED = "for speed: a step waits for its loads in any case"

_GONE = "the fault needs an earlier store that evicts source blocks of a load between the load's plan and its execution"

EQUIVALENT = (
    Fault("H26", "a request waits for more blocks than arrive within the deadline")
    .without("head-arrives-within-the-deadline", Never(), needs={"slow_tier"})
    .unseen(
        "the wait ends at the deadline anyway, and the request computes what has not arrived: only time is lost",
        "offload/test_costs.py::test_a_load_longer_than_the_deadline_is_cut_where_the_deadline_ends",
    ),
    Fault("H5", "blocks of a load are read before they are loaded, except those of its last piece")
    .without("layer-waits-for-all-pieces", DropOperand("before"), at="layer-gates", needs={"offload"})
    .unseen(
        "each slice waits for the one before it, so the last piece ends after all others: see "
        "slice-waits-for-the-one-before",
        "offload/test_load_gates.py::test_a_layer_waits_for_the_last_slice_of_earlier_pieces_and_of_its_group",
    ),
    Fault("H5", "a piece of a load counts as loaded when its first slice is loaded")
    .without(
        "layer-waits-for-the-last-slice-of-each-piece",
        Rewrite("fences[-1] for", "fences[0] for"),
        at="layer-gates",
        needs={"offload"},
    )
    .unreached(
        "the fault needs a last piece that ends before another piece's last slice, which was submitted before it",
        "offload/test_load_gates.py::test_a_layer_waits_for_the_last_slice_of_earlier_pieces_and_of_its_group",
    ),
    Fault("H22", "blocks are never released if the source of their load is gone")
    .without("missing-load-is-settled", needs={"offload", "reset"})
    .unreached(_GONE, "offload/test_store_and_load.py::test_a_load_of_evicted_blocks_fails"),
    Fault("H26", "a request whose blocks were evicted before its load waits forever")
    .without("missing-load-is-reported", needs={"offload", "reset"})
    .unreached(_GONE, "offload/test_store_and_load.py::test_a_load_of_evicted_blocks_fails"),
    Fault("H22", "blocks and slots of loads that a close dropped are never released")
    .without("dropped-load-is-settled", needs={"close", "offload"})
    .unreached(
        "the fault needs a close in the turn in which the offload worker receives the load",
        "offload/test_worker.py::test_close_releases_a_load_of_which_no_piece_has_begun",
    ),
    Fault("H21", "a failed load releases its slots a second time at the close")
    .without("dropped-load-settles-once", Always(), needs={"close", "failing_copy", "offload"})
    .unreached(
        "the fault needs a close in the turn in which the offload worker sees a piece fail, while "
        "other loads fill its lane",
        "offload/test_worker.py::test_close_does_not_end_a_failed_load_a_second_time",
    ),
    Fault("H5", "a step joins a load that has no fences yet for some of its pieces")
    .without(
        "load-is-ready-after-all-pieces-were-submitted",
        DropOperand("submitted"),
        at="load-is-submitted",
        needs={"offload"},
    )
    .unreached(
        "nothing ends between two polls of the simulated offload worker, so the pieces of a load are "
        "submitted in order",
        "offload/test_pieces.py::test_a_load_is_ready_once_all_pieces_were_submitted_in_any_order",
    ),
    Fault("H5", "a step waits for loads of requests that are not in it")
    .without("step-waits-only-for-its-own-loads", DropOperand(1), at="loads-of-a-step", needs={"offload"})
    .unseen(
        "the step waits too long, but this cannot cause a deadlock",
        "offload/test_store_and_load.py::test_each_layer_of_a_step_waits_for_the_loads_of_its_own_requests_only",
    ),
    Fault("H5", "a step asks for fences that a load does not have yet")
    .without("load-without-fences-gates-no-step", DropOperand("submitted"), at="loads-of-a-step", needs={"offload"})
    .unseen(
        "a request joins a step when its load has all its fences: see load-has-its-fences-before-its-first-step",
        "offload/test_loads.py::test_a_load_that_is_not_ready_has_no_fences_for_a_step",
    ),
    Fault("H9", "a load's record is deleted before its last message arrives")
    .without("settled-is-read-before-the-events", MoveAfter("transfer-events-are-taken"), needs={"offload"})
    .unreached(
        "the simulated offload worker takes no turn while the engine polls",
        "offload/test_loads.py::test_a_load_that_ends_during_a_poll_is_reported_by_the_next_poll",
    ),
    Fault("H9", "a request joins a step although its load has failed")
    .without(
        "failed-load-is-not-reported-as-ready",
        DropOperand(2),
        at="load-is-submitted",
        needs={"failing_copy", "offload"},
    )
    .unseen(
        "the step's results are dropped: see load-failure-is-known-with-its-step",
        "offload/test_pieces.py::test_load_with_a_failed_piece_is_never_reported_as_ready",
    ),
    Fault("H9", "the failure of a load is reported repeatedly")
    .without("load-failure-is-reported-once", DropOperand("reported"), needs={"failing_copy", "offload"})
    .unseen(
        "the first report preempts the request, and later ones belong to an earlier epoch",
        "offload/test_loads.py::test_failed_load_is_reported_once_by_worker_or_engine",
    ),
    Fault("H9", "the failure of a load is reported twice")
    .without("load-failure-is-not-reported-again-at-the-end", Always(), needs={"failing_copy", "offload"})
    .unseen(
        "the first report preempts the request, and later ones belong to an earlier epoch",
        "offload/test_loads.py::test_failed_load_is_reported_once_by_worker_or_engine",
    ),
    Fault("H15", "a request continues from a state of another number of tokens")
    .without("state-covers-the-planned-tokens", Never(), needs={"offload", "states"})
    .unseen(
        "no fault that is drawn gives a stored state another number of tokens: this check is for defects in other code",
        "engine/test_offload.py::test_a_recurrent_state_of_other_tokens_is_a_miss_and_is_dropped",
    ),
    Fault("H10", "a load counts as ended between two pieces, and its slots are free")
    .without(
        "load-settles-after-its-last-piece-began",
        DropOperand(1),
        Change(
            "load-settles-once",
            Rewrite(".settled", ".settled or job.job_id not in self._context.unsettled._unsettled"),
        ),
        at="load-is-settled",
        needs={"offload"},
    )
    .unreached(
        "the fault needs another copy that runs between two pieces of the load",
        "offload/test_pieces.py::test_a_load_with_remaining_pieces_keeps_its_host_slots",
    ),
    Fault("H10", "a failed load that has released its blocks still writes them")
    .without(
        "failed-load-begins-no-more-pieces",
        Always(),
        Change(
            "load-settles-once",
            Rewrite(".settled", ".settled or job.job_id not in self._context.unsettled._unsettled"),
        ),
        needs={"failing_copy", "offload"},
    )
    .unreached(
        "the fault needs another copy that runs between two pieces of the load",
        "offload/test_pieces.py::test_a_load_with_a_failed_piece_submits_no_more_pieces",
    ),
    Fault("H15", "a load with a failed piece continues, and its request does not learn of the failure")
    .without(
        "load-fails-with-any-of-its-pieces",
        Value("copy.failure if job.all_begun else None"),
        needs={"failing_copy", "offload"},
    )
    .unreached(
        "the fault needs another copy that runs between two pieces of the load",
        "offload/test_pieces.py::test_a_load_with_a_failed_piece_submits_no_more_pieces",
    ),
    Fault("H9", "a request uses KV whose bytes changed in host memory")
    .without("changed-block-is-not-loaded", Never(), needs={"offload", "self_check"})
    .unreached(
        "no schedule changes bytes in host memory",
        "offload/test_checksums.py::test_a_block_with_a_flipped_bit_fails_its_load_and_is_counted",
    ),
    Fault("H22", "the slots and device blocks of a load that was refused stay in use forever")
    .without("refused-load-is-settled", needs={"offload", "self_check"})
    .unreached(
        "no schedule changes bytes in host memory",
        "offload/test_checksums.py::test_a_block_with_a_flipped_bit_fails_its_load_and_is_counted",
    ),
)

EXEMPT = (
    Exempt("_Load.gates", ("submitted",), "see load-without-fences-gates-no-step"),
    Exempt("_Load.share_left", ("submitted", "submitted", "submitted"), _FOR_SPEED),
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
