"""The charts of a report: what each one shows, and what a healthy run looks like in it."""

from dataclasses import dataclass

# Okabe and Ito's colours: told apart by colour-blind readers, and by lightness in print.
BLUE, VERMILLION, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#E69F00", "#009E73", "#CC79A7"
TIMES = {  # metric: (name, colour)
    "time_rollout_s": ("rollout", BLUE),
    "time_reward_s": ("reward", ORANGE),
    "time_train_s": ("train", GREEN),
    "time_sync_s": ("sync", PURPLE),
}


@dataclass(frozen=True)
class Line:
    """One metric of a chart: `key` names it, "a/b" the ratio of two."""

    key: str
    label: str
    color: str = BLUE
    dashed: bool = False
    right: bool = False  # measured on an axis of its own, on the right
    exact: bool = False  # free of noise, so never smoothed
    held_out: bool = False  # taken from the evaluations, drawn as points


@dataclass(frozen=True)
class Chart:
    """One small plot: its lines and the sentence under it."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    caption: str
    paper: str = ""  # its figure in the DAPO paper
    right_unit: str = ""
    percent: bool = False
    stacked: bool = False
    wide: bool = False


PAPER_CHARTS = (
    Chart(
        "Accuracy",
        "right answers",
        (Line("accuracy", "training"), Line("accuracy", "held-out", VERMILLION, held_out=True)),
        "Share of responses that are right; in a healthy run both rise, and training that rises while "
        "held-out stays flat is memorising.",
        paper="figure 2a",
        percent=True,
    ),
    Chart(
        "Entropy",
        "nats per token",
        (Line("entropy", "entropy"),),
        "How undecided the policy is about its next token; a healthy run levels off above 0, while a fall "
        "to 0 early means collapse, which clip-higher exists to prevent.",
        paper="figures 2b, 7c",
    ),
    Chart(
        "Groups without a signal",
        "of groups sampled",
        (
            Line("groups_all_correct/groups_sampled", "all correct"),
            Line("groups_all_wrong/groups_sampled", "all wrong", VERMILLION, dashed=True),
        ),
        "Groups whose responses all score alike teach nothing, so dynamic sampling drops them; in a healthy "
        "run all-correct grows while all-wrong shrinks.",
        paper="figure 3b",
        percent=True,
    ),
    Chart(
        "Response length",
        "tokens",
        (
            Line("response_length_mean", "mean"),
            Line("response_length_max", "longest", VERMILLION, dashed=True),
        ),
        "Tokens per response; a healthy mean moves slowly and stays well under the length limit, where "
        "responses are cut.",
        paper="figure 7a",
    ),
    Chart(
        "Reward",
        "mean reward",
        (Line("reward_mean", "reward"),),
        "Mean reward of all sampled responses, before groups are dropped; a healthy run climbs steadily, and "
        "reward that climbs without held-out accuracy is being gamed or memorised.",
        paper="figure 7b",
    ),
    Chart(
        "Mean probability",
        "probability",
        (Line("mean_prob", "mean probability"),),
        "Probability the policy gives the tokens it trains on, entropy's mirror image; a slow rise is "
        "healthy, a rush to 1 means exploration has stopped.",
        paper="figure 7d",
    ),
)

UPDATE_CHARTS = (
    Chart(
        "Clipped tokens",
        "of trained tokens",
        (
            Line("clip_frac_low", "low, 1 − ε"),
            Line("clip_frac_high", "high, 1 + ε", VERMILLION, dashed=True),
        ),
        "Share of tokens whose ratio hit the lower or upper clip; small and steady is healthy, growth means "
        "updates too large or data too old.",
        percent=True,
    ),
    Chart(
        "Approximate KL",
        "nats per token",
        (Line("approx_kl", "KL"),),
        "How far the updates moved the policy from the one that wrote the responses; near 0 and flat is "
        "healthy, and a spike is an update that went too far.",
    ),
    Chart(
        "Gradient norm and learning rate",
        "gradient norm",
        (
            Line("grad_norm", "gradient norm"),
            Line("lr", "learning rate", VERMILLION, dashed=True, right=True, exact=True),
        ),
        "Size of the gradient against the learning-rate schedule; a bounded norm is healthy, and repeated "
        "spikes often come before a collapse.",
        right_unit="learning rate",
    ),
    Chart(
        "Where the time went",
        "seconds per step",
        tuple(Line(key, name, color) for key, (name, color) in TIMES.items()),
        "Seconds of each step by phase; rollout usually leads, and a healthy run holds steady unless "
        "responses grow or more groups have to be drawn.",
        stacked=True,
        wide=True,
    ),
    Chart(
        "Rollout mismatch",
        "KL, nats per token",
        (
            Line("rollout_mismatch_kl", "KL"),
            Line("rollout_mismatch_max", "largest", VERMILLION, dashed=True, right=True),
        ),
        "How much the rollout engine and the trainer disagree on the same tokens; close to 0 and flat is "
        "healthy, and growth means training is off-policy without knowing it.",
        right_unit="largest of one token",
    ),
)
