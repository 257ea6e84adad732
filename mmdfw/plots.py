from typing import Callable
import jax, jax.numpy as jnp, numpy as np
import matplotlib.pyplot as plt

colors = dict(mmdfw="#0072B2", mmdfw_greedy="#56B4E9", mmdfw_exact="#000000", mmdfw_exact_greedy="#777777", mmdfw_literal="#CC79A7",
              svgd="#D55E00", independent="#999999", stein_points="#009E73", nuts="#E69F00", sgld="#F0E442")

def plot_style() -> dict:
    "One look for all figures: `plt.rcParams.update(plot_style())`"
    return {"figure.figsize": (5.0, 3.4), "figure.dpi": 72, "savefig.dpi": 144, "axes.spines.top": False, "axes.spines.right": False,
            "axes.grid": True, "grid.alpha": 0.25, "font.size": 10, "legend.frameon": False, "lines.linewidth": 1.8,
            "axes.prop_cycle": plt.cycler(color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]),
            "image.cmap": "Blues", "figure.constrained_layout.use": True}

def plot_density(
    logdensity: Callable,  # (2,) -> scalar
    box,  # ((x0, x1), (y0, y1))
    ax=None,
    num: int = 120,  # grid points a side
):
    "Filled contours of a density in the plane."
    ax = ax or plt.gca()
    xs, ys = (np.linspace(*side, num) for side in box)
    grid = jnp.asarray(np.stack(np.meshgrid(xs, ys), -1).reshape(-1, 2), dtype=float)
    logs = np.asarray(jax.lax.map(logdensity, grid, batch_size=4096)).reshape(num, num)
    ax.contourf(xs, ys, np.exp(logs - logs.max()), levels=12, cmap="Blues", alpha=0.6)
    ax.set(xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
    ax.grid(False)
    return ax

def plot_particles(
    positions,  # (n, 2) or more columns, of which the first two are drawn
    weights=None,  # disc areas; hollow discs for negative weights
    ax=None,
    color: str = "#D55E00",
    size: float = 1500.0,  # area, in points^2, of a weight of one half
    **kwargs,  # for `scatter`
):
    "Particles as discs, areas in proportion to their weights."
    ax = ax or plt.gca()
    positions = np.asarray(positions)
    weights = np.full(len(positions), 1 / len(positions)) if weights is None else np.asarray(weights)
    face = [color if w >= 0 else "none" for w in weights]
    ax.scatter(positions[:, 0], positions[:, 1], s=2 * size * np.abs(weights), facecolors=face, edgecolors="white" if (weights >= 0).all() else color, linewidths=0.6, alpha=0.9, **kwargs)
    return ax

def plot_history(history, ax=None, label: str = None, **kwargs):
    "Discrepancy against the number of particles, on log axes."
    ax = ax or plt.gca()
    ax.loglog(history.count, history.discrepancy, label=label, **kwargs)
    ax.set(xlabel="particles", ylabel="MMD²")
    return ax
