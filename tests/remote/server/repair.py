"""What nnsight 0.8.1 needs before ndif 0.1.2 can serve with it, on transformers >= 5.23. Import before a model is made."""

from nnsight.modeling.mixins.remotable import Remotable
from nnsight.modeling.transformers import TransformersModel

_describe = Remotable.describe_checkpoint.__func__
_tp_size = Remotable.max_tp_size.__func__


# ndif 0.1.2 still passes trust_remote_code beside the model key; nnsight 0.8.1 reads it from the key.
def _describe_checkpoint(cls, model_key, dtype, trust_remote_code=False):
    return _describe(cls, model_key, dtype)


def _max_tp_size(cls, model_key, trust_remote_code=False):
    return _tp_size(cls, model_key)


Remotable.describe_checkpoint = classmethod(_describe_checkpoint)
Remotable.max_tp_size = classmethod(_max_tp_size)

# nnsight asks the pipeline class which preprocessors it loads, but transformers 5.23 names that class by a string: a
# model without weights then gets no tokenizer and cannot be built. Only text generation is served here.
TransformersModel._loaded_preprocessors = lambda self: {"tokenizer"}
