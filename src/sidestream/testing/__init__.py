"""The test kit of the engine: fakes, fault injection, reference results, and the torture test, which runs the engine in
many orders of execution under the order checker (`sidestream_order`).
"""
