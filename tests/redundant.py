"""A negative control that can retrieve: a trained model whose Address was made redundant by surgery.

Before the reader, one block is inserted that writes the residual stream once more, several times as strong (and the
layers after it are scaled up to match, so that the model still answers). The address then stands in the stream
twice: it follows the old Address block *and* the inserted one. Transplanting either redirects the answer, so no
single block is the Address, although a rule that takes the best block would name one.
"""

import torch
from torch import nn
from transformers import AutoModelForCausalLM

import encode_address as ea

GAIN = 4.0


class Echo(nn.Module):
    """A linear mixer that writes its (normalised) input, scaled; it has no state."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.out_proj = nn.Linear(width, width, bias=False)
        self.out_proj.weight.data = scale * torch.eye(width)

    def forward(self, hidden_states, **kwargs):
        return self.out_proj(hidden_states)


def redundant_model(name: str = "tiny-gdn") -> ea.HybridModel:
    """The bundled model `name` with a second, echoing block before its last softmax layer."""
    source = ea.load(name)
    old, reader = source.module, source.softmax_layers[-1]
    config = old.config.__class__(**old.config.to_dict())
    types = list(config.layer_types)
    config.layer_types = [*types[:reader], "full_attention", "linear_attention", *types[reader:]]
    config.num_hidden_layers = len(types) + 2
    new = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    weights = {}
    for key, value in old.state_dict().items():
        parts = key.split(".")
        if parts[:2] == ["model", "layers"] and int(parts[2]) >= reader:
            parts[2] = str(int(parts[2]) + 2)
        weights[".".join(parts)] = value.clone()
    new.load_state_dict(weights, strict=False)
    new.tie_weights()
    softmax, echo = new.model.layers[reader], new.model.layers[reader + 1]
    softmax.self_attn.o_proj.weight.data.zero_()
    scale = GAIN * _residual_size(source, reader)
    mixer = Echo(config.hidden_size, scale)
    setattr(echo, source.family.linear_attr, mixer)
    for layer in (softmax, echo):
        mlp = getattr(layer, "mlp", None) or layer.shared_mlp
        getattr(mlp, "down_proj", None) is not None and mlp.down_proj.weight.data.zero_()
        getattr(mlp, "output_linear", None) is not None and mlp.output_linear.weight.data.zero_()
    unit = 0.0 if type(echo.input_layernorm).__name__.startswith("Qwen") else 1.0  # Qwen's weight counts from 1
    echo.input_layernorm.weight.data.fill_(unit)
    for layer in new.model.layers[reader + 2 :]:
        for key, weight in layer.named_parameters():
            if key.split(".")[-2] in ("o_proj", "out_proj", "down_proj", "output_linear"):
                weight.data.mul_(1 + GAIN)
    new.config.name_or_path = f"redundant-{name}"
    model = ea.load(new, tokenizer=source.tokenizer)
    model.name, model.folder = f"redundant-{name}", source.folder
    return model


def _residual_size(model: ea.HybridModel, layer: int) -> float:
    """The typical root mean square of the residual stream as it enters `layer` at the last position."""
    ids = torch.tensor([item.host.ids for item in ea.tasks.dictionary(model).questions(16)])
    sizes = []
    handle = model.module.model.layers[layer].register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append((args[0] if args else kwargs["hidden_states"])[:, -1]),
        with_kwargs=True,
    )
    with torch.no_grad():
        model.module(input_ids=ids, use_cache=False)
    handle.remove()
    return float(sizes[0].pow(2).mean(-1).sqrt().mean())
