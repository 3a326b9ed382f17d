"""Layers for planners, in numbers: K-FAC of weights [o, i] in float32."""

from hypothesis import strategies as st

from natgrad.distributed import LayerDemand, Placement

NAMES = ("auto", "comm-opt", "mem-opt", "hybrid", "reduce-scatter", "dp", "pipelined", "background")


def kfac(outputs, inputs, form="eigen", blocks=1, alone=True):
    sizes, eigen = {"A": inputs, "G": outputs}, form == "eigen"
    triangles = {part: blocks * d * (d + 1) // 2 for part, d in sizes.items()}
    whole = blocks * sum(d * d for d in sizes.values())
    vectors = blocks * (outputs + inputs) if eigen else 0
    return LayerDemand(
        parts={part: blocks * float(d) ** 3 for part, d in sizes.items()},
        sums=sum(triangles.values()),
        results={part: blocks * (d * d + d) if eigen else triangles[part] for part, d in sizes.items()},
        gradients=blocks * outputs * inputs,
        blocks=blocks,
        averages=4 * sum(triangles.values()),
        held=4 * (whole + vectors),
        alone=alone,
    )


def resnet50():
    """The convolutions and the head of ResNet-50, 54 in all."""
    shapes, width = [(64, 147)], 64
    for stage, count in enumerate((3, 4, 6, 3)):
        inner = 64 * 2**stage
        for block in range(count):
            shapes += [(inner, width), (inner, 9 * inner), (4 * inner, inner)]
            shapes += [(4 * inner, width)] if block == 0 else []
            width = 4 * inner
    shapes.append((1000, 2049))
    return {f"layer{index}": kfac(*shape) for index, shape in enumerate(shapes)}


def resnet50_positions(batch):
    """Positions of each of these layers, of a batch of images of 224 x 224."""
    counts, before = [112 * 112], 56
    for stage, count in enumerate((3, 4, 6, 3)):
        after = 56 // 2**stage
        for block in range(count):
            counts += [before**2, after**2, after**2]
            counts += [after**2] if block == 0 else []
            before = after
    return {f"layer{index}": batch * positions for index, positions in enumerate([*counts, 1])}


ranks = st.integers(1, 4096) | st.sampled_from([1, 2, 3, 4, 6, 8, 60, 64, 1024, 4093, 4096])
sizes = st.integers(1, 600)
layers = st.builds(
    kfac, sizes, sizes, st.sampled_from(["eigen", "inverse"]), blocks=st.integers(1, 3), alone=st.booleans()
)
models = st.lists(layers, max_size=12).map(lambda own: {f"layer{index}": work for index, work in enumerate(own)})


@st.composite
def placements(draw, names=NAMES, speeds=True):
    """A number of ranks and options that fit it."""
    P, name = draw(ranks), draw(st.sampled_from(names))
    some = draw(st.none() | st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=1, max_size=5)) if speeds else None
    fast = None if some is None else tuple(some[rank % len(some)] for rank in range(P))
    fraction = draw(st.floats(1e-4, 1)) if name == "hybrid" else None
    owners = draw(st.sampled_from(["balanced", "round-robin"]))
    return P, Placement(name=name, fraction=fraction, owners=owners, speeds=fast)
