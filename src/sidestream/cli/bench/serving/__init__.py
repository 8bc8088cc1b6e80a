"""`sidestream bench serve`: what a user of the HTTP server sees, beside the same engine asked in process.

workload   the requests: clients, rounds, prompts
reply      an HTTP reply and its server-sent events, with the time at which each arrived
answers    one answer's times; windows, rates, gaps and bursts of many
clients    processes that ask a server
server     the server's process
baseline   the same requests put to an engine in process
measure    the figures of a server, and of one that runs already
stalled    the figures of a server that has slow readers
"""
