"""What an FP8 cache does to a model's words: models and text to try it on, and the scores.

Used by ``octavo demo``, ``accuracy``, ``calibrate`` and ``serve``. Frameworks are imported inside functions, so that
importing this package costs nothing and ``score`` needs torch alone.
"""
