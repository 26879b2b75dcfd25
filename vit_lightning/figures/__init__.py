"""The figures of a run: curves, sheets of images, confusion matrices, the report of a test, the HTML page of runs.

Offers what commands draw into the folder of a run, ``ValidationPictures``, a callback that draws while it trains, and
``lightning board``. May import data, storage, training, config and inspect.
"""
