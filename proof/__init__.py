"""The laboratory of the ordering law, which is not installed: fakes, fault injection, reference results, mutations, and
the torture test, which runs the engine in many orders of execution under the order checker (`sidestream_order`).
"""
