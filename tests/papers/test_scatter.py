"""A cloud as a picture: every point is drawn, with its domain's colour and its class's mark."""

from xml.etree import ElementTree

import pytest

from fedmutual_papers.drawing import MARKS, Scatter, make_scatter_table
from fedmutual_papers.figures import describe_picture, make_standalone_svg
from fedmutual_papers.result import Cloud

pytestmark = pytest.mark.long

SVG = "{http://www.w3.org/2000/svg}"


def scatter(classes=("dog", "house"), domains=("photo", "sketch")):
    points = tuple(
        (d, k, float(d), float(k) + 0.125 * n) for d in range(len(domains)) for k in range(len(classes)) for n in range(3)
    )
    cloud = Cloud(domains=domains, classes=classes, explained=(0.34, 0.12), silhouette=0.305, points=points)
    return Scatter("features", "features of node photo", cloud)


@pytest.mark.parametrize("classes", [("dog", "house"), tuple("0123456789"), tuple(f"c{n}" for n in range(40))])
def test_every_point_is_drawn_once(classes):
    made = scatter(classes)
    root = ElementTree.fromstring(make_standalone_svg(made))
    legend = 2 + (len(classes) if classes == ("dog", "house") else 0)
    assert len(root.findall(f".//{SVG}use")) == len(made.cloud.points) + legend
    texts = " ".join(t.text for t in root.iter(f"{SVG}text"))
    assert ("photo" in texts, "dog" in texts) == (True, "dog" in classes)


def test_marks_tell_the_classes_as_far_as_there_are_marks():
    assert scatter(tuple("0123456789")).marks == [f"${n}$" for n in range(10)]
    assert len(set(scatter(tuple(f"c{n}" for n in range(len(MARKS)))).marks)) == len(MARKS)
    assert set(scatter(tuple(f"c{n}" for n in range(len(MARKS) + 1))).marks) == {"o"}


def test_in_words_and_numbers():
    made = scatter()
    assert describe_picture(made) == "features of node photo. The axes hold 34 % and 12 % of the variance; silhouette 0.30"
    table = make_scatter_table(made)
    assert [[c.text for c in row] for row in table.rows][1] == ["photo", "house", "3", "0.00", "1.12"]  # mean 1.125
    assert len(table.csv.splitlines()) == 1 + len(made.cloud.points)
