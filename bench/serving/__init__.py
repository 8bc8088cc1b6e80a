"""`python -m bench serve`: latency and throughput for users of the HTTP server, compared with the same engine without
a server. The modules:

workload   the requests: numbers of clients and rounds, prompts
reply      an HTTP reply and its server-sent events, each with its arrival time
answers    times of one answer, and values computed from many answers: time windows, rates, gaps and bursts
clients    processes that send requests to a server
server     the server's process
baseline   the same requests to an engine without a server
measure    the figures of a server that the benchmark starts, and of a server that already runs
stalled    the figures of a server with slow readers
"""
