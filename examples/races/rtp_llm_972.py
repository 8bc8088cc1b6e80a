"""The next step reads hidden states that a bookkeeping thread has not published yet: drafts of two steps ago.

Thread: https://github.com/alibaba/rtp-llm/pull/972 (open when read): without a synchronisation at the top of a step
    (`RTP_LLM_MTP_DROP_BROAD_SYNC`), the worker publishes milliseconds late: accept length 2.42, not 4.20. The text
    stays right, so no test of the output notices.
Simplified: the state is one number, the step that it belongs to; the worker is a stream behind the step.
Fix: the main thread publishes on the compute stream, before it hands the rest to the worker, as in the thread.
"""

from functools import partial

from sidestream_order.explore import explore
from sidestream_order.sim import SimDevice

STEPS = 3


def program(device: SimDevice, *, fixed: bool) -> None:
    """Each step drafts from the state that the step before has published."""
    hidden, state = device.allocate("hidden", 2).data.view(2, 1)
    drafted = device.allocate("drafted from", STEPS).data.view(STEPS, 1)
    compute, worker = device.stream("compute"), device.stream("bookkeeping")
    compute.submit(partial(state.fill_, 0), writes=[state], label="prefill")
    for step in range(STEPS):
        compute.submit(
            partial(drafted[step].copy_, state), reads=[state], writes=[drafted[step]], label=f"drafts of step {step}"
        )
        verified = compute.submit(partial(hidden.fill_, step + 1), writes=[hidden], label=f"verify step {step}")
        publisher = compute if fixed else worker
        publisher.wait(verified)
        publisher.submit(partial(state.copy_, hidden), reads=[hidden], writes=[state], label=f"publish step {step}")
    device.close()
    assert drafted.flatten().tolist() == list(range(STEPS)), "a step drafts from an old state"


if __name__ == "__main__":
    for fixed in (False, True):
        print(f"{'fixed' if fixed else 'published'}: {explore(partial(program, fixed=fixed))}\n")
