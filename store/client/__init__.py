"""The objects that a program uses: a producer, a pull consumer, and `create_store`, which creates an empty store.

These modules may import every folder of the engine except the tools.
"""
