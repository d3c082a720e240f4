"""A cloud as a picture: every point is drawn, with its domain's colour and its class's mark."""

from xml.etree import ElementTree

import pytest

from fedmutual_papers.figures import MARKS, Scatter, choose_marks, describe_picture, make_standalone_svg
from fedmutual_papers.store import Cloud

pytestmark = pytest.mark.long

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("classes", [("dog", "house"), tuple("0123456789"), tuple(f"c{n}" for n in range(40))])
def test_every_point_is_drawn_once(classes):
    domains, kinds = ("photo", "sketch"), range(len(classes))
    points = tuple((d, k, float(d), float(k) + 0.125 * n) for d in (0, 1) for k in kinds for n in range(3))
    cloud = Cloud(domains=domains, classes=classes, explained=(0.34, 0.12), silhouette=0.305, points=points)
    made = Scatter("features", "features of node photo", cloud)
    root = ElementTree.fromstring(make_standalone_svg(made))
    legend = 2 + (len(classes) if classes == ("dog", "house") else 0)
    assert len(root.findall(f".//{SVG}use")) == len(points) + legend
    texts = " ".join(t.text for t in root.iter(f"{SVG}text"))
    assert ("photo" in texts, "dog" in texts) == (True, "dog" in classes)
    assert describe_picture(made) == "features of node photo. The axes hold 34 % and 12 % of the variance; silhouette 0.30"
    table = made.make_table()
    assert [c.text for c in table.rows[1]] == ["photo", classes[1], "3", "0.00", "1.12"]  # mean 1.125


def test_marks_tell_the_classes_as_far_as_there_are_marks():
    assert choose_marks(tuple("0123456789")) == [f"${n}$" for n in range(10)]
    assert len(set(choose_marks([f"c{n}" for n in range(len(MARKS))]))) == len(MARKS)
    assert set(choose_marks([f"c{n}" for n in range(len(MARKS) + 1)])) == {"o"}
