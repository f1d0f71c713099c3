"""Methods that run the model again: they take one more argument, `replay`.

`replay(edit)` runs the model on the same pixels after `edit` and gives the recording with the gradient of the target's score.
"""

from visattn.methods.replayed._transition import transition_attention

__all__ = ["transition_attention"]
