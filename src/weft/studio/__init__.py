"""`weft studio`: a local page that answers "what would overlap give for my layer on my machine"
while a slider is dragged.

    state      what is asked: machine, operation, sizes, and what differs from the machine
    answers    pure functions from a state to JSON
    worker     processes that compute answers, so that the server stays responsive
    live       runs the same case on this machine
    server     the pages and the answers over HTTP, for this machine only
"""
