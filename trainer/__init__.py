"""trainer: a GPT trainer made of PyTorch's own parts.

It knows nothing of how it was launched: under `resilient run` it is supervised, under torchrun it is not, and the numbers are
the same. `trainer.main:train` is its entry point; `trainer.data` prepares and reads text; `trainer.model` is a plain GPT to
which `trainer.parallel` applies the layout from outside. Of the runtime it imports `resilient.worker` and nothing else.
"""
