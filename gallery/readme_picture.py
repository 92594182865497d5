"""Draw docs/pictures.png, the picture of the README: a segment of the log, and the shares of a topic's tags.

python gallery/readme_picture.py
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORE, TARGET = ROOT / "tests" / "golden" / "demo", ROOT / "docs" / "pictures.png"


def draw(target: Path) -> None:
    """Draw the picture into the file `target`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    import rmq_spark

    with matplotlib.rc_context(rmq_spark.PLOT_STYLE), rmq_spark.open_reader(STORE) as reader:
        figure, (left, right) = plt.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
        rmq_spark.plot_segment(reader, ax=left)
        rmq_spark.plot_tag_shares(reader, "orders", ax=right)
        figure.savefig(target, dpi=90, metadata={"Software": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(TARGET)
