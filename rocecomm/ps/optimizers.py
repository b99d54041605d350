"""What a server does with the workers' aggregated pushes."""

import numpy as np


class Add:
    """``value += push``. For every numeric dtype."""

    def check(self, dtype):
        """TypeError for a dtype it cannot handle."""
        if np.dtype(dtype).kind not in "iufc":
            raise TypeError(f"pushes of dtype {dtype} cannot be added")

    def state(self, value):
        """What it remembers of a key between updates."""
        return None

    def update(self, value, push, state):
        """Change ``value`` in place; ``push`` may be overwritten. Returns the new state."""
        value += push
        return state


class SGD:
    """Stochastic gradient descent: ``v = momentum * v + push; value -= lr * v``.

    ``lr`` the learning rate, ``momentum`` from 0 to below 1, ``weight_decay`` adds that
    share of the value to each push. For float dtypes.
    """

    def __init__(self, lr, momentum=0.0, weight_decay=0.0):
        if not lr > 0 or not 0 <= momentum < 1 or not weight_decay >= 0:
            raise ValueError(f"SGD needs lr > 0, 0 <= momentum < 1 and weight_decay >= 0, not "
                             f"{lr!r}, {momentum!r}, {weight_decay!r}")
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def check(self, dtype):
        """TypeError for a dtype it cannot handle."""
        if np.dtype(dtype).kind != "f":
            raise TypeError(f"SGD works on float dtypes, not {dtype}")

    def state(self, value):
        """The velocity: zeros, or None without momentum."""
        return np.zeros_like(value) if self.momentum else None

    def update(self, value, push, velocity):
        """One step; overwrites ``push``. Returns the velocity."""
        if self.weight_decay:
            push += self.weight_decay * value
        if self.momentum:
            velocity *= self.momentum
            velocity += push
            push = velocity
        value -= self.lr * push
        return velocity
