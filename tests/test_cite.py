"""What a result says of the papers behind it, through the package as users call it."""

import jax
import jax.numpy as jnp
import mmdfw
import numpyro
import numpyro.distributions as dist


def level(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def keys(result) -> set:
    return {paper.key for paper in mmdfw.cite(result).papers}


def test_a_loaded_result_cites_what_the_saved_one_did(tmp_path):
    target = mmdfw.from_numpyro(level, jnp.array([0.5, 1.0]))
    result = mmdfw.fit(jax.random.key(0), target, num_particles=10, progress=False)
    result.save(tmp_path / "level.npz")
    again = mmdfw.load(tmp_path / "level.npz", target)
    assert keys(result) == keys(again) and {"futami2019bayesian", "phan2019numpyro"} <= keys(result)
    assert mmdfw.cite(again).bibtex == mmdfw.cite(result).bibtex


def test_another_part_has_another_paper():
    chosen = dict(num_particles=3, progress=False, refine=False, embedding="stein")
    result = mmdfw.fit(jax.random.key(0), lambda x: -0.5 * x @ x, jnp.zeros(2), step_rule=mmdfw.OpenLoop(), **chosen)
    expected = {"futami2019bayesian", "chen2018stein", "wirth2023acceleration", "zhang2022pathfinder"}
    assert keys(result) == expected
    assert "open-loop steps: Wirth, Kerdreux & Pokutta (2023)." in str(mmdfw.cite(result))
