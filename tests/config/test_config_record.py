"""Configurations as records: exact JSON, a hash of what is computed, and differences."""

import hashlib
import json
import re

import pytest
from ml_collections import ConfigDict

from headlab import config as cfg
from headlab.errors import UsageError


def test_a_configuration_survives_json_exactly(changed):
    config = changed(head__name="mixture", head__n_experts=3, head__cutoffs=[10, 20])
    config.optimizer.peak_rate = 0.1 + 0.2
    config.optimizer.clip_norm = None
    config.data.corpus = "text:/data/ü/*.txt"
    resolved = cfg.resolve(config)
    restored = cfg.from_json(cfg.to_json(resolved))
    assert restored == resolved
    assert cfg.to_json(restored) == cfg.to_json(resolved)
    assert restored.head.cutoffs == (10, 20)
    types_of = {key: type(value) for key, value in cfg.flatten(resolved).items()}
    assert {key: type(value) for key, value in cfg.flatten(restored).items()} == types_of


def test_a_record_from_before_an_option_existed_has_its_default(changed):
    tree = json.loads(cfg.to_json(cfg.resolve(changed(train__steps=77))))
    del tree["mesh"], tree["model"]["remat"]
    restored = cfg.from_json(json.dumps(tree))
    assert (restored.train.steps, restored.mesh.data, restored.model.remat) == (77, 1, False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "not valid JSON"),
        ("[]", "not an object"),
        ('{"train": {"stpes": 3}}', "did you mean train.steps?"),
        ('{"train": {"steps": 3.5}}', "train.steps=3.5"),
    ],
)
def test_a_damaged_record_is_refused(text, expected):
    with pytest.raises(UsageError, match=re.escape(expected)):
        cfg.from_json(text)


def test_a_value_that_json_would_change_is_not_recorded(changed):
    with pytest.raises(TypeError, match=re.escape("head.cutoffs")):
        cfg.to_json(changed(head__cutoffs=[1, 2]))


def test_the_hash_tells_apart_what_is_computed_and_not_how_it_is_carried_out(changed):
    base = cfg.resolve(cfg.default_config())
    carried_out = changed(mesh__data=2, log__every=3, checkpoint__keep=9, eval__batch_size=8)
    assert cfg.config_hash(cfg.resolve(carried_out)) == cfg.config_hash(base)
    assert re.fullmatch("[0-9a-f]{16}", cfg.config_hash(base))
    others = [changed(train__steps=6001), changed(eval__every=7), changed(head__name="untied")]
    hashes = {cfg.config_hash(cfg.resolve(other)) for other in others}
    assert len(hashes | {cfg.config_hash(base)}) == 4


def test_options_that_came_later_leave_the_hash_of_what_was_computed_before(changed):
    later = [key for key, option in cfg.OPTIONS.items() if option.later]
    values = cfg.flatten(cfg.resolve(cfg.default_config()))
    before = {
        key: value
        for key, value in values.items()
        if key not in later and not key.startswith(cfg.OPERATIONAL)
    }
    digest = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:16]
    assert "model.norm_eps" in later
    assert cfg.config_hash(cfg.resolve(cfg.default_config())) == digest
    assert cfg.config_hash(cfg.resolve(changed(model__norm_eps=1e-5))) != digest


def test_the_hash_of_a_record_is_the_hash_of_the_configuration(changed):
    config = cfg.resolve(changed(head__softcap=3.0))
    assert cfg.config_hash(cfg.from_json(cfg.to_json(config))) == cfg.config_hash(config)


def test_differences_name_the_keys_that_matter_and_the_operational_ones_apart(changed):
    base = cfg.resolve(cfg.default_config())
    other = cfg.resolve(
        changed(train__steps=7, mesh__data=2, head__name="mixture", head__n_experts=2)
    )
    differing = cfg.differences(base, other)
    assert differing["train.steps"] == (6000, 7)
    assert differing["head.n_experts"] == (cfg.ABSENT, 2)
    assert differing["head.softcap"] == (None, cfg.ABSENT)
    assert "mesh.data" not in differing
    assert cfg.differences(base, other, operational=True) == {"mesh.data": (1, 2)}
    assert cfg.differences(base, base) == {}


def test_a_difference_of_type_alone_is_a_difference():
    one, other = ConfigDict({"seed": 1}), ConfigDict({"seed": True})
    assert cfg.differences(one, other) == {"seed": (1, True)}
