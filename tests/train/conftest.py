from tests.train.runs import inputs, straight

__all__ = ["inputs", "straight"]
