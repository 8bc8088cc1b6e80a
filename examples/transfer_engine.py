"""The transfer engine in an engine of your own, without a language model: `transfer_engine.py DIRECTORY`."""

import sys
import time

import torch

import sidestream_kv as kv

LAYOUT = kv.KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_tokens=4, dtype="float32")
CONFIG = kv.OffloadConfig(host="16KiB", disk=sys.argv[1], disk_capacity="1MiB")
NUM_BLOCKS = 8  # on the device; a request of 24 tokens takes 6


class ToyEngine:
    """Runs one request at a time. The KV of a token is the token itself, in every layer."""

    def __init__(self) -> None:
        self.device = kv.CpuDevice(compute_threads=1)  # on a GPU: kv.CudaDevice()
        self.compute = self.device.stream("compute")
        memory = self.device.allocate("kv", NUM_BLOCKS * LAYOUT.block_bytes)
        self.blocks = memory.data.view(torch.float32).view(NUM_BLOCKS, LAYOUT.num_layers, 2, LAYOUT.block_tokens, -1)
        self.pool = kv.FencedPool("device blocks", NUM_BLOCKS)
        self.keys = kv.BlockKeys(fingerprint="toy", layout=LAYOUT)
        self.transfers = kv.OffloadConnector(
            device=self.device, pools=[self.pool], memory=kv.BlockMemory(memory, LAYOUT), costs=kv.CostModel(LAYOUT),
            tiers=kv.TierStack.open(CONFIG, self.device, kv.TierContext(LAYOUT, "toy")), metrics=kv.Metrics(),
            load_deadline_s=CONFIG.load_deadline_s,
        )  # fmt: skip

    def run(self, request_id: int, tokens: list[int], *, epoch: int = 0, preempt: bool = False) -> tuple[int, int]:
        """The sum of the request's KV, and the number of its blocks that came from a tier."""
        keys: list[kv.Key] = []
        self.keys.extend(keys, tokens)
        loaded = len(self.transfers.locate(keys))  # blocks in host memory or on disk, from the first block on
        if loaded:  # those on disk are first read into host memory
            self.transfers.submit([kv.PromotePlan(request_id, epoch, tuple(keys[:loaded]))])
            self.event()
        lease = self.pool.take(len(keys))
        ids, gates = lease.ids.copy(), [*lease.after]  # the step waits for earlier users of its blocks
        if loaded:
            self.transfers.submit(
                [kv.LoadPlan(request_id, epoch, tuple(keys[:loaded]), tuple(ids[:loaded]), lease.after)]
            )
            if isinstance(self.event(), kv.LoadFailed):
                loaded = 0  # compute all of it
        for layer in self.transfers.gates([(request_id, epoch)]).by_layer:
            gates += layer  # a real engine waits for them layer by layer
        for fence in gates:
            self.compute.wait(fence)
        result: list[int] = []
        step = self.compute.submit(lambda: result.append(self.forward(tokens, ids, loaded)))
        self.transfers.submit([kv.StorePlan(tuple(keys[loaded:]), tuple(ids[loaded:]), (step,))])
        # The blocks are free once the store has settled; the stream of their next user waits for the step.
        lease.release(after=[step], until=self.transfers.transfers_fence())
        self.device.wait_host(step, reason="step")
        self.transfers.flush(timeout_s=10)  # a real engine runs other requests meanwhile
        return self.run(request_id, tokens, epoch=epoch + 1) if preempt else (result[0], loaded)

    def forward(self, tokens: list[int], ids: list[int], loaded: int) -> int:
        """Compute the KV of the blocks that were not loaded, and sum all of it. Runs on the compute stream."""
        for index in range(loaded, len(ids)):
            self.blocks[ids[index]] = torch.tensor(tokens[4 * index : 4 * index + 4])[:, None].float()
        return int(self.blocks[ids].sum())

    def event(self) -> kv.TransferEvent:
        """Wait for the next event. A real engine polls between two steps instead."""
        while not (events := self.transfers.poll()):
            time.sleep(0.001)
        return events[0]


for start in ("first start", "second start"):
    engine = ToyEngine()
    for request_id, first in enumerate((1, 100, 1)):
        total, loaded = engine.run(request_id, list(range(first, first + 24)), preempt=first == 100)
        print(f"{start}, request {request_id}: KV sums to {total}, {loaded} of 6 blocks came from a tier")
    engine.device.close()
    engine.transfers.close()
