"""Random checkpoint folders: layouts, heads, names, numbers and keys, right and wrong."""

import json

import numpy as np
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.fuzz.folders import (
    CLASSIFIED,
    DECODER,
    EMBEDDING,
    HEAD,
    INDEX,
    NESTED,
    decoder_keys,
    numbered,
    tensors_of,
    write,
)
from tests.tokenizer_files import CLASSES, FILES, add_tokenizer, pieces

YARN = {"type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOW = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1, "layer_types": None}
MIXED = ["sliding_attention", "full_attention"]
KEYS = {
    "none": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "no attention bias": {"attention_bias": False},
    "a bias of outputs": {"attention_out_bias": True},
    "window": {"sliding_window": 7},
    "window switched on": WINDOW,
    "window switched off": WINDOW | {"use_sliding_window": False},
    "window null": {"sliding_window": None},
    "window of all positions": WINDOW | {"sliding_window": 64, "max_window_layers": 0},
    "window nearly as long": WINDOW | {"sliding_window": 39, "max_window_layers": 0},
    "layer types": WINDOW | {"layer_types": MIXED},
    "layer types switched off": {"sliding_window": 7, "layer_types": MIXED},
    "swish": {"hidden_act": "swish"},
    "epsilon": {"rms_norm_eps": 0.1},
    "theta": {"rope_theta": 500.0},
    "theta null": {"rope_theta": None},
    "scaling empty": {"rope_scaling": {}},
    "scaling without type": {"rope_scaling": {"factor": 4.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "two types": {"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "yarn": {"rope_scaling": YARN | {"original_max_position_embeddings": 16}},
    "yarn, original at the top": {"rope_scaling": YARN, "original_max_position_embeddings": 16},
    "yarn, original twice": {
        "rope_scaling": YARN | {"original_max_position_embeddings": 32},
        "original_max_position_embeddings": 16,
    },
    "yarn, all keys": {
        "rope_scaling": YARN
        | {"original_max_position_embeddings": 16, "truncate": False, "beta_fast": 4, "mscale": 1.3, "mscale_all_dim": 0.5}
    },
    "yarn, attention factor": {
        "rope_scaling": YARN | {"original_max_position_embeddings": 16, "factor": None, "attention_factor": 1.5}
    },
    "llama3": {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}},
    "llama3, original at the top": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 8},
    "llama3, no original": {"rope_scaling": LLAMA3},
    "partial rotary, unscaled": {"partial_rotary_factor": 0.5},
    "parameters and scaling": {
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
        "rope_scaling": {"type": "linear", "factor": 2.0},
    },
    "keys of other families": {"logit_scale": 2.0, "attention_multiplier": 0.5, "final_logit_softcapping": 1.0},
    "factors of granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.6,
        "logits_scaling": 1.7,
    },
    "a factor of 0": {"residual_multiplier": 0},
    "a layer without experts": {"mlp_only_layers": [1]},
    "experts in every second layer": {"decoder_sparse_step": 2},
    "factors of experts as they are": {"norm_topk_prob": False},
    "one expert": {"num_experts_per_tok": 1},
    "more experts than there are": {"num_experts_per_tok": 7},
    "no experts": {"num_experts": 0, "num_local_experts": 0},
    "layers without rotary": {"no_rope_layers": [0, 1]},
    "every second layer without rotary": {"no_rope_layers": None, "no_rope_layer_interval": 2},
    "no positions": {"position_embedding_type": None},
    "a width of shared experts": {"shared_intermediate_size": 24},
    "experts": {"num_local_experts": 4},
    "a scale of scores": {"query_pre_attn_scalar": 64},
    "a pattern of windows": {"sliding_window_pattern": 2, "layer_types": None},
    "frequencies of windows": {"rope_local_base_freq": 500.0, "rope_parameters": None},
    "queries that grow": {
        "rope_parameters": {"rope_theta": 1e4, **YARN, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.7}
    },
    "bidirectional": {"use_bidirectional_attention": True},
    "gelu": {"hidden_act": "gelu"},
    "gelu by tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "another key's activation": {"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"},
    "partial rotary": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    "an activation of sentence-transformers": {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    "repository code": {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
    "no architecture": {"architectures": None},
    "no number of heads": {"num_key_value_heads": None},
}
"""Changes of a configuration, by the name of the case."""
NESTED_PREFIXES = {"language_model.model.": 8, "model.language_model.": 5, "language_model.": 1, "text.": 0.3}
"""Prefixes of the language part of multimodal models."""
DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64
PREFIXES = {"model.": 9, "": 5, "base_model.model.model.": 0.3, "module.model.": 0.3, "transformer.": 0.3}


class Draw:
    """One random folder.

    Attributes:
        folder: the folder.
        story: the choices, in words.
        encode: the ids of a text by the tokenizer's file, or None if the folder has no vocabulary.
    """

    def __init__(self, folder, family, seed):
        self.folder, self.story = folder, [family, f"seed {seed}"]
        self._rng = rng = np.random.default_rng([seed, *family.encode()])
        classifies = rng.random() < 0.2 and family in CLASSIFIED
        auto = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
        labels = {"num_labels": int(rng.integers(1, 4))} if classifies else {}
        self.tensors, self.keys = tensors_of(family, seed=seed % 3, auto=auto, **labels)
        if family.endswith("_moe") and self._pick("experts", {"numbered": 1, "stacked": 1}) == "numbered":
            self.tensors = numbered(self.tensors)
        self._keys()
        self._head(classifies)
        self._numbers()
        self._names()
        self._files()
        self._tokenizer()

    def _pick(self, kind, options):
        """Pick by weights, and tell."""
        weights = np.array([*options.values()], float)
        chosen = [*options][self._rng.choice(len(weights), p=weights / weights.sum())]
        self.story.append(f"{kind}: {chosen!r}")
        return chosen

    def _keys(self):
        for _ in range(self._rng.integers(0, 3)):
            changes = KEYS[self._pick("key", dict.fromkeys(KEYS, 1))]
            keys = self.keys if "architectures" in changes else decoder_keys(self.keys)
            if "rope_theta" in changes or "rope_scaling" in changes:
                keys.pop("rope_parameters", None)
                keys.setdefault("rope_theta", 10000.0)
            keys |= changes
        for keys in [self.keys, *([self.keys["text_config"]] if "text_config" in self.keys else [])]:
            for name in [*keys]:
                if self._rng.random() < 0.003:
                    self.story.append(f"{name} absent or null")
                    if self._rng.random() < 0.5:
                        del keys[name]
                    else:
                        keys[name] = None

    def _head(self, classifies):
        self.keys["tie_word_embeddings"] = self._pick("tied", {True: 1, False: 1})
        architectures = self.keys.get("architectures") or ["LlamaForCausalLM"]
        bare = architectures[0].split("For")[0] + "Model"
        named = {"own": 14, "none": 1, "bare": 1, "of another family": 0.3}
        chosen = self._pick("architectures", named)
        own = {"none": None, "bare": [bare], "of another family": ["FalconForCausalLM"]}
        self.keys["architectures"] = own.get(chosen, self.keys.get("architectures"))
        if classifies:
            return
        head = self._pick("head", {"other": 4, "equal": 2, "none": 1, "alone": 0.5})
        if head == "equal":
            self.tensors[HEAD] = self.tensors[EMBEDDING].clone()
        if head == "none":
            del self.tensors[HEAD]
        if head == "alone":
            del self.tensors[EMBEDDING]

    def _numbers(self):
        kind = self._pick("dtype", dict.fromkeys(DTYPES, 1))
        mixed = self._rng.random() < 0.2
        self.tensors = {n: t.to(DTYPES[self._rng.integers(4)] if mixed else kind) for n, t in self.tensors.items()}
        damage = self._pick("numbers", {"right": 30, "nan": 1, "inf": 1, "absent": 1, "shape": 1})
        name = sorted(self.tensors)[self._rng.integers(len(self.tensors))]
        if damage in ("nan", "inf"):
            self.tensors[name].view(-1)[0] = float(damage)
        if damage == "absent":
            del self.tensors[name]
        if damage == "shape":
            self.tensors[name] = self.tensors[name][:-1].clone()
        if self._rng.random() < 0.3:
            self.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(4)

    def _names(self):
        is_nested = self.keys.get("model_type") in NESTED
        own, prefixes = ("language_model.model.", NESTED_PREFIXES) if is_nested else ("model.", PREFIXES)
        prefix = self._pick("prefix", prefixes)
        part = self._pick("names", {"all": 9, "some": 1})
        named = {}
        for name, tensor in self.tensors.items():
            if not name.startswith(DECODER):
                named[name] = tensor
                continue
            keeps = part == "some" and self._rng.random() < 0.5
            keeps &= ".experts." not in name  # transformers stacks experts in the order of their whole names
            named[(own if keeps else prefix) + name.removeprefix("model.")] = tensor
        self.tensors = named

    def _files(self):
        folder, rng = self.folder, self._rng
        right = "single", "shards", "single and stale index", "single and lost shards", "stale copy"
        layout = self._pick("files", dict.fromkeys(right, 1) | {"wrong index": 0.2, "no index": 0.2})
        if layout.startswith("single"):
            if layout != "single":
                stale = {name: tensor + 1 for name, tensor in self.tensors.items()}
                write(folder, stale, self.keys, shards=2)
            write(folder, self.tensors, self.keys)
            if layout == "single and lost shards":
                for shard in folder.glob("model-*"):
                    shard.unlink()
            return
        write(folder, self.tensors, self.keys, shards=int(rng.integers(2, 4)))
        index = json.loads((folder / INDEX).read_text())
        listed, files = index["weight_map"], sorted(folder.glob("model-*.safetensors"))
        name = sorted(listed)[rng.integers(len(listed))]
        other = next(file for file in files if file.name != listed[name])
        if layout == "stale copy":
            self.stale = other, {name: self.tensors[name] + 1}
        if layout == "wrong index":
            listed[name] = other.name
            (folder / INDEX).write_text(json.dumps(index))
        if layout == "no index":
            (folder / INDEX).unlink()

    def _tokenizer(self):
        """Write a tokenizer beside the model, unless there is none, and keep its witness as `encode`."""
        kind = self._pick("tokenizer", {"none": 2, "json": 4, "model": 2, "both": 1, "partial": 0.5})
        if kind == "none":
            return
        named = self._pick("class", dict.fromkeys(CLASSES, 1))
        config = {"bos_token": "<s>", "eos_token": "</s>", **({"tokenizer_class": named} if named else {})}
        config |= {"legacy": self._pick("legacy", dict.fromkeys((True, False, None), 1))}
        config = None if named is None else config
        if kind == "partial":
            add_tokenizer(self.folder, config or {})
            return
        files = {}
        if kind in ("json", "both"):
            source = Tokenizer.from_str(FILES[self._pick("file", dict.fromkeys(FILES, 1))][0].to_str())
            files["json"] = source.to_str()
            source.no_truncation()
            source.no_padding()
            self.encode = lambda text: source.encode(text, add_special_tokens=False).ids
        if kind in ("model", "both"):
            rules = ("add_dummy_prefix", "remove_extra_whitespaces")
            files["model"] = pieces(**{rule: self._pick(rule, {True: 1, False: 1}) for rule in rules})
        if kind == "model":
            self.encode = sentencepiece.SentencePieceProcessor(model_proto=files["model"]).encode
        add_tokenizer(self.folder, config, **files)

    encode, stale = None, None

    def make_stale(self):
        """Put a stale copy of a tensor into another shard. transformers may read it, so the witness runs before."""
        if self.stale is not None:
            file, copies = self.stale
            save_file(load_file(file) | copies, file, metadata={"format": "pt"})
