"""The figures of a run: curves, sheets of images, confusion matrices, the report of a test, the page of ``inspect``.

Offers what commands draw into the folder of a run, and ``ValidationPictures``, a callback that draws while it
trains. May import data, storage, training, config and inspect.
"""
