"""`octavo serve`: an OpenAI-compatible server over a transformers model with octavo's paged cache.

    api        routes, streams and errors in OpenAI's shapes          fastapi; one event loop
    engine     one thread: takes requests in, steps, hands text out   nothing of HTTP
    scheduler  who runs in a step, and on which pages                 nothing of the model
    runner     one forward pass over the ragged tokens of a step      nothing of requests

Frameworks are imported inside functions or in files that only the server loads.
"""
