"""Documents packed in one row get what they get alone, whichever way a caller says where they are; or are refused."""

import warnings
from itertools import pairwise

import pytest
import torch
import transformers
from conftest import GENERIC, LargestTensor, build, ids, options
from tolerances import GRADIENT, LOGITS
from transformers import DynamicCache
from transformers.utils.generic import TransformersKwargs

from rope_ext import patch_model, registry, unpatch_model
from rope_ext.attention import Layout, blockwise, choosing, documents
from rope_ext.conformance import tiny
from rope_ext.patches import arguments, rows

TINY = {"falcon": {}, "deepseek_v3": {}, "falcon_rotary": {"alibi": False}}
HOSTS = ["llama", "mistral_window", "qwen2", "qwen2_moe", "qwen3", "bloom", "mpt", "t5", "umt5", "falcon"]
"""The others of FAMILIES and HOSTED share an adapter with one of these."""

LENGTHS = (40, 90, 13)
"""Of three documents, in tokens: shorter and longer than the trained length."""

PAIRS = [
    (host, method)
    for host in HOSTS
    for method, kind in registry.METHODS.items()
    if not (host in ("t5", "umt5") and getattr(kind, "causal_only", False))
]
pairs = pytest.mark.parametrize(("host", "method"), PAIRS)
FEW = [("llama", "rope"), ("mistral_window", "yarn"), ("qwen3", "alibi"), ("llama", "kerple"), ("bloom", "kerple")]
FEW += [("llama", "dynamic"), ("bloom", "comay"), ("qwen2", "dca"), ("mpt", "shaw"), ("llama", "transformer_xl")]
FEW += [
    ("t5", "t5_bias"),
    ("umt5", "fire"),
    ("t5", "shaw"),
    ("llama", "learned"),
    ("mpt", "learned"),
    ("bloom", "rope"),
]
few = pytest.mark.parametrize(("host", "method"), FEW)


def patched(host, method, **given):
    """T5: its encoder, which reads both ways."""
    model = tiny(host.partition("_rot")[0], **TINY[host], **given) if host in TINY else build(host, **given)
    model = model.get_encoder() if model.config.is_encoder_decoder else model
    return patch_model(model, method, **options(method, model))


def read(model, **given):
    """Logits, or the hidden states of an encoder."""
    found = model(**given)
    return found.logits if "logits" in found else found.last_hidden_state


def pack(lengths=LENGTHS):
    """(documents, the row that holds them, positions that start again, positions that go on, cumulative lengths)."""
    alone = [ids(length, seed=seed) for seed, length in enumerate(lengths)]
    again = torch.cat([torch.arange(length) for length in lengths])[None]
    edges = torch.tensor([0, *lengths]).cumsum(0)
    return alone, torch.cat(alone, 1), again, torch.arange(sum(lengths))[None], edges.to(torch.int32)


def apart(found, wanted):
    return float((found - wanted).detach().abs().max())


@pairs
@torch.no_grad()
def test_each_document_gets_what_it_gets_alone(host, method):
    model = patched(host, method)
    alone, row, again, on, edges = pack()
    wanted = torch.cat([read(model, input_ids=text) for text in alone], 1)
    numbers = documents.of_lengths(edges, 1, row.shape[1])
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": 90, "max_length_k": 90}
    assert apart(read(model, input_ids=row), wanted) > 100 * LOGITS  # the twin: without a word about documents
    for said in (
        {"position_ids": again},
        {"position_ids": again, "attention_mask": torch.ones_like(row)},
        {"attention_mask": numbers + 1},
        {"seq_idx": numbers.int()},
        {**lengths, "position_ids": again, "seq_idx": numbers},
        lengths,
    ):
        assert apart(read(model, input_ids=row, **said), wanted) < LOGITS, sorted(said)
    # positions go on across the row: as each document alone with the positions that it has there
    places = [on[:, a:b] for a, b in pairwise(edges)]
    wanted = [read(model, input_ids=text, position_ids=place) for text, place in zip(alone, places, strict=True)]
    assert apart(read(model, input_ids=row, position_ids=on, **lengths), torch.cat(wanted, 1)) < LOGITS


@few
@torch.no_grad()
def test_the_same_in_long_calls_and_rows_with_padding(host, method, monkeypatch):
    monkeypatch.setattr(choosing, "SMALL", 0)
    model = patched(host, method)
    alone, row, again, *_ = pack((30, 50, 20))
    other = ids(70, seed=9)
    both = torch.cat((row, torch.cat((other, ids(30, seed=8)), 1)))
    mask = torch.ones_like(both)
    mask[1, 70:] = 0
    positions = torch.cat((again, (mask[1:].cumsum(-1) - 1)))
    found = read(model, input_ids=both, attention_mask=mask, position_ids=positions)
    wanted = torch.cat([read(model, input_ids=text) for text in alone], 1)
    assert apart(found[:1], wanted) < LOGITS
    assert apart(found[1:, :70], read(model, input_ids=other)) < LOGITS


@few
def test_gradients_of_a_packed_row_are_those_of_its_documents(host, method):
    model = patched(host, method)
    alone, row, again, *_ = pack((25, 80, 13))
    embed = model.get_input_embeddings()
    learned = {name: weight for name, weight in model.named_parameters() if "position_encoding." in name}

    def gradients(*calls):
        model.zero_grad()
        inputs = []
        for words, said in calls:
            inputs.append(embed(words).detach().requires_grad_())
            found = read(model, inputs_embeds=inputs[-1], **said)
            (found * torch.linspace(-1, 1, found.shape[-1])).square().mean(-1).sum().backward()
        model_grads = {name: weight.grad.clone() for name, weight in learned.items()}
        return {"inputs": torch.cat([each.grad for each in inputs], 1), **model_grads}

    wanted = gradients(*[(text, {}) for text in alone])
    found = gradients((row, {"position_ids": again}))
    leaking = gradients((row, {}))
    for name, gradient in wanted.items():
        scale = gradient.abs().max()
        assert apart(found[name], gradient) < GRADIENT * max(1, scale), name
    assert apart(leaking["inputs"], wanted["inputs"]) > 100 * GRADIENT


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("method", ["yarn", "alibi", "dynamic"])
@torch.no_grad()
def test_layers_keep_their_windows_in_packed_rows(family, method):
    model = patched(family, method, use_sliding_window=True, sliding_window=12, max_window_layers=1)
    alone, row, again, *_ = pack()
    wanted = torch.cat([read(model, input_ids=text) for text in alone], 1)
    assert apart(read(model, input_ids=row, position_ids=again), wanted) < LOGITS
    wide = patched(family, method)
    assert apart(torch.cat([read(wide, input_ids=text) for text in alone], 1), wanted) > 100 * LOGITS


@few
@torch.no_grad()
def test_a_boundary_in_the_wrong_place_is_noticed(host, method, monkeypatch):
    model = patched(host, method)
    alone, row, again, _, edges = pack()
    wanted = torch.cat([read(model, input_ids=text) for text in alone], 1)
    right = documents.of_lengths(edges, 1, row.shape[1])
    planted = right.roll(1)
    planted[:, 0] = 0
    monkeypatch.setattr(documents, "of_positions", lambda *given: planted)
    assert apart(read(model, input_ids=row, position_ids=again), wanted) > 10 * LOGITS


@pytest.mark.parametrize("family", [*GENERIC, "falcon_rotary", "deepseek_v3"])
@torch.no_grad()
def test_generic_models_keep_documents_apart_by_positions_or_refuse(family):
    model = patched(family, "linear")
    alone, row, again, on, edges = pack()
    wanted = torch.cat([read(model, input_ids=text) for text in alone], 1)
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    if family == "gpt_oss":  # its masks are not told the positions: stock lets documents see each other
        with pytest.raises(ValueError, match="does not keep them apart"):
            model(row, position_ids=again)
        return
    for said in ({"position_ids": again}, lengths, {**lengths, "position_ids": again}):
        assert apart(read(model, input_ids=row, **said), wanted) < LOGITS
    assert apart(read(model, input_ids=row), wanted) > 100 * LOGITS
    with pytest.raises(ValueError, match="leave `position_ids` out"):
        model(row, position_ids=on, **lengths)


@pytest.mark.parametrize(
    ("host", "method"),
    [
        *[
            ("llama", "rope"),
            ("qwen2", "yarn"),
            ("mistral_window", "yarn"),
            ("llama", "sinusoidal"),
            ("llama", "alibi"),
        ],
        *[("qwen3", "dynamic"), ("llama", "self_extend"), ("bloom", "alibi"), ("mpt", "yarn"), ("t5", "t5_bias")],
    ],
)
@torch.no_grad()
def test_no_matrix_of_all_pairs(host, method, monkeypatch):
    monkeypatch.setattr(choosing, "SMALL", 0)
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 2**17)
    model = patched(host, method)
    lengths = (300, 500, 424, 824)
    _, row, again, *_ = pack(lengths)
    pairs = sum(lengths) ** 2  # bytes of a bool mask
    with LargestTensor() as seen:
        model(row, position_ids=again)
    assert seen.bytes < pairs
    if (host, method) == ("llama", "rope"):
        unpatch_model(model)
        with LargestTensor() as seen:
            model(row, position_ids=again, use_cache=False)
        assert seen.bytes >= pairs


@torch.no_grad()
def test_other_attention_implementations():
    alone, row, _, on, edges = pack()
    lengths = {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
    for host in ("llama", "mistral_window"):
        model = patched(host, "yarn", attn_implementation="eager")
        wanted = torch.cat([read(model, input_ids=text) for text in alone], 1)
        assert apart(read(model, input_ids=row, position_ids=on, **lengths), wanted) < LOGITS
    # flash attention takes cumulative lengths; it cannot run here, what it would be given can be looked at
    told = arguments.Told(masked_by_positions=True)
    model.config._attn_implementation = "flash_attention_2"
    _, given = told(model.model, (row,), {"seq_idx": documents.of_lengths(edges, 1, row.shape[1])})
    assert torch.equal(given["cu_seq_lens_q"], edges)
    assert given["max_length_k"] == max(LENGTHS)
    assert given["attention_mask"] is None
    assert not given["use_cache"]
    model.config._attn_implementation = "flex_attention"
    assert "attention_mask" not in told(model.model, (row,), lengths)[1]  # its own mask, from positions
    with pytest.raises(ValueError, match="'flex_attention'"):
        told(model.model, (row,), {**lengths, "position_ids": on})


def test_experts_and_losses_with_packed_rows():
    model = patched("qwen2_moe", "alibi")
    _, row, again, *_ = pack()
    found = model(row, position_ids=again, labels=row, output_router_logits=True)
    assert torch.isfinite(found.loss)
    assert found.cache is None if "cache" in found else found.past_key_values is None


@pytest.mark.parametrize("host", ["llama", "bloom"])
@pytest.mark.parametrize("method", ["yarn", "alibi", "dca"])
def test_what_cannot_be_honoured_is_refused_and_leaves_no_trace(host, method):
    model = patched(host, method)
    _, row, again, on, edges = pack()
    numbers = documents.of_lengths(edges, 1, row.shape[1])
    before = read(model, input_ids=row, position_ids=again)
    square = torch.ones(1, 1, row.shape[1], row.shape[1], dtype=torch.bool).tril()
    for said, why in (
        ({"position_ids": again, "use_cache": True}, "with a cache"),
        ({"seq_idx": numbers, registry.compat().cache_argument(model): DynamicCache()}, "with a cache"),
        ({"seq_idx": numbers, "attention_mask": square}, "mask of all pairs"),
        ({"seq_idx": numbers[:, 1:]}, "one number per token"),
        ({"seq_idx": numbers * (numbers < 2)}, "comes back to a document"),
        ({"cu_seq_lens_q": edges}, "must both be given"),
        ({"cu_seq_lens_q": edges, "cu_seq_lens_k": edges - 1}, "be the same"),
        ({"cu_seq_lens_q": edges[:-1], "cu_seq_lens_k": edges[:-1]}, "must rise from 0 to 143"),
        ({"cu_seq_lens_q": edges[1:], "cu_seq_lens_k": edges[1:]}, "must rise from 0 to 143"),
        ({"seq_idx": numbers.clamp(max=1), "cu_seq_lens_q": edges, "cu_seq_lens_k": edges}, "disagree"),
        ({"position_ids": again, "is_causal": False}, "is_causal"),
        ({"token_type_ids": numbers}, "would be ignored"),
        ({"head_mask": numbers}, "would be ignored"),
        ({"decoder_position_ids": on}, "would be ignored"),
    ):
        with pytest.raises(ValueError, match=why):
            model(row, **said)
    crossing = torch.tensor([0, 100, 286], dtype=torch.int32)
    with pytest.raises(ValueError, match="crosses from one row into the next"):
        model(row.repeat(2, 1), cu_seq_lens_q=crossing, cu_seq_lens_k=crossing)
    with pytest.warns(UserWarning, match="`postion_ids` is not read"):
        model(row, postion_ids=again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(row, token_type_ids=torch.zeros_like(row), labels=row, num_items_in_batch=7, return_dict=True)
    assert torch.equal(read(model, input_ids=row, position_ids=again), before)


def test_refusals_of_a_family():
    _, row, again, *_ = pack()
    numbers = (again == 0).cumsum(-1)
    model = build("t5")
    patch_model(model, "t5_bias")
    for said in ({"position_ids": again}, {"seq_idx": numbers}, {"attention_mask": numbers}):
        with pytest.raises(ValueError, match="encoder with a decoder"):
            model(row, decoder_input_ids=row, **said)
    with pytest.raises(ValueError, match="reads an encoder"):
        model.decoder(row, position_ids=again, encoder_hidden_states=torch.zeros(1, 5, 64))
    for host, name, value in (
        ("mpt", "output_attentions", True),
        ("bloom", "shift_labels", row),
        ("mpt", "is_causal", False),
    ):
        model = patched(host, "alibi")
        with pytest.raises(ValueError, match=f"`{name}`"):
            model(row, **{name: value})


@pytest.mark.parametrize("host", ["bloom", "mpt", "llama"])
@pytest.mark.parametrize("method", ["sinusoidal", "dca", "alibi"])
@torch.no_grad()
def test_positions_of_one_document_are_read(host, method):
    model, words = patched(host, method), ids(30)
    whole = read(model, input_ids=words)
    moved = apart(read(model, input_ids=words, position_ids=torch.arange(7, 37)[None]), whole)
    assert (moved > 10 * LOGITS) == (method != "alibi")  # distances alone: where a text begins does not matter
    said = {"position_ids": torch.cat((torch.arange(15), torch.arange(50, 65)))[None]}
    assert apart(read(model, input_ids=words, attention_mask=torch.ones_like(words), **said), whole) > 10 * LOGITS
    # decoding: positions that agree with the cache are taken, others refused
    name = registry.compat().cache_argument(model)
    held = getattr(model(words[:, :20], use_cache=True), name)
    step = read(model, input_ids=words[:, 20:21], position_ids=torch.tensor([[20]]), **{name: held})
    assert apart(step, whole[:, 20:21]) < LOGITS
    if method != "sinusoidal" or host != "llama":  # there positions are added to embeddings, and no key has one
        with pytest.raises(ValueError, match="positions of the cached keys are not known"):
            model(words[:, 21:22], position_ids=torch.tensor([[90]]), **{name: held})


def test_sinks_are_counted_from_the_start_of_a_document():
    model = build("llama")
    patch_model(model, "rope", window=16, sinks=3)
    alone, row, again, on, edges = pack()
    with torch.no_grad():
        wanted = torch.cat([read(model, input_ids=text) for text in alone], 1)
        assert apart(read(model, input_ids=row, position_ids=again), wanted) < LOGITS
    with pytest.raises(ValueError, match="do not start at 0"):
        model(row, position_ids=on, cu_seq_lens_q=edges, cu_seq_lens_k=edges)


def test_every_argument_of_every_hosted_forward_is_decided():
    """What a newer transformers adds has to be looked at before it is accepted."""
    names = """input_ids inputs_embeds attention_mask cache past_key_values use_cache labels logits_to_keep return_dict
    output_attentions output_hidden_states output_router_logits cache_position
    decoder_input_ids decoder_inputs_embeds decoder_attention_mask encoder_outputs encoder_hidden_states
    encoder_attention_mask start_positions end_positions""".split()
    decided = {*names, *arguments.TOLD}
    kinds = [
        getattr(transformers, f"{family}{kind}")
        for family in (
            "Llama",
            "Mistral",
            "Qwen2",
            "Qwen2Moe",
            "Qwen3",
            "Qwen3Moe",
            "Bloom",
            "Mpt",
            "T5",
            "UMT5",
            "MT5",
        )
        for kind in ("Model", "ForCausalLM", "EncoderModel", "ForConditionalGeneration", "ForSequenceClassification")
        if hasattr(transformers, f"{family}{kind}")
    ]
    for kind in kinds:
        assert set(arguments._names(kind.forward)) <= decided, kind.__name__
    known = {*arguments.TOLD, *arguments.PASSED, *arguments.HANDED_ON}
    assert set(TransformersKwargs.__annotations__) <= known


def test_layouts_of_documents():
    numbers = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, -1, 1]])
    layout = Layout(2, 6, 6, causal=True, documents=numbers)
    assert [run.keys for run in layout.runs()] == [slice(0, 2), slice(2, 5), slice(0, 4), slice(5, 6)]
    assert all(run.keys == run.queries for run in layout.runs())
    assert layout.key_positions(torch.device("cpu")).tolist()[0][:5] == [0, 1, 0, 1, 2]
    both_ways = Layout(2, 6, 6, causal=False, separate=True, documents=numbers)
    assert len(both_ways.runs()) == 4
    seen = both_ways.visible(slice(0, 6), 6, torch.device("cpu"))[0, 0]
    assert seen[2].tolist() == [False, False, True, True, True, False]
    assert not Layout(2, 6, 6, causal=False, documents=numbers).runs()  # an encoder's padding, not documents
    assert rows.flash_lengths(numbers)["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 10, 11, 12]


def test_positions_that_jump_ahead_are_one_document_under_a_mask():
    jump = torch.tensor([[0, 1, 2, 9, 10]])
    assert documents.of_positions(jump, torch.ones(1, 5, dtype=torch.bool)).tolist() == [[0] * 5]
    assert documents.of_positions(jump, None).tolist() == [[0, 0, 0, 1, 1]]
    padded = torch.tensor([[1, 1, 0, 1, 2]])
    assert documents.of_positions(padded, torch.tensor([[0, 0, 1, 1, 1]]) > 0).tolist() == [[0] * 5]
