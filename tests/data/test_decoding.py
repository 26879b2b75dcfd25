import io
import random
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from vit_lightning.data import decoding
from vit_lightning.data.decoding import decode
from vit_lightning.data.images import centre_box
from vit_lightning.errors import UserError

HEIGHT, WIDTH = 30, 40


def picture(height=HEIGHT, width=WIDTH):
    """A photograph's gradients: light to the right, red at the top."""
    y, x = np.mgrid[:height, :width]
    red = 255 - y * 200 // height
    return np.stack([red, x * 255 // width, 60 + x * 100 // width], axis=-1).astype(np.uint8)


def encoded(image, form, **options):
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def gray():
    return np.asarray(Image.fromarray(picture()).convert("L"))


def as_rgb(values):
    return np.repeat(values[:, :, None], 3, axis=2)


def all_of(width, height):
    return 0, 0, width, height


def decoded(data, size=(HEIGHT, WIDTH), **options):
    return decode(data, "the name.png", size=size, choose_box=all_of, **options)


def big_endian_sixteen():
    return Image.fromarray((gray().astype(np.uint16) * 257).astype(">u2"))


def with_alpha():
    alpha = np.linspace(0, 255, WIDTH).round().astype(np.uint8)[None, :, None].repeat(HEIGHT, 0)
    return Image.fromarray(np.concatenate([picture(), alpha], 2))


def palette():
    return Image.fromarray(picture()).quantize(16)


def rotated():
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # shown after a quarter turn clockwise
    return encoded(Image.fromarray(picture()).rotate(90, expand=True), "PNG", exif=exif)


def animated(form):
    frames = [Image.fromarray(picture()), Image.new("RGB", (WIDTH, HEIGHT), "blue")]
    options = {"lossless": True} if form == "WEBP" else {}
    return encoded(frames[0], form, save_all=True, append_images=frames[1:], **options)


def transparent_palette():
    image = Image.new("P", (WIDTH, HEIGHT), 1)
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.paste(0, (0, 0, WIDTH // 2, HEIGHT))
    return encoded(image, "PNG", transparency=0), np.asarray(image.convert("RGB"))


GOOD = {
    "PNG": lambda: (encoded(Image.fromarray(picture()), "PNG"), picture()),
    "JPEG": lambda: (encoded(Image.fromarray(picture()), "JPEG", quality=95), picture()),
    "progressive JPEG": lambda: (encoded(Image.fromarray(picture()), "JPEG", quality=95, progressive=True), picture()),
    "WebP": lambda: (encoded(Image.fromarray(picture()), "WEBP", lossless=True), picture()),
    "BMP": lambda: (encoded(Image.fromarray(picture()), "BMP"), picture()),
    "CMYK JPEG": lambda: (encoded(Image.fromarray(picture()).convert("CMYK"), "JPEG", quality=95), picture()),
    "CMYK TIFF": lambda: (encoded(Image.fromarray(picture()).convert("CMYK"), "TIFF"), picture()),
    "gray PNG": lambda: (encoded(Image.fromarray(gray()), "PNG"), as_rgb(gray())),
    "gray JPEG": lambda: (encoded(Image.fromarray(gray()), "JPEG", quality=95), as_rgb(gray())),
    "16-bit PNG": lambda: (encoded(Image.fromarray(gray().astype(np.uint16) * 257), "PNG"), as_rgb(gray())),
    "16-bit TIFF": lambda: (encoded(Image.fromarray(gray().astype(np.uint16) * 257), "TIFF"), as_rgb(gray())),
    "16-bit TIFF, big-endian": lambda: (encoded(big_endian_sixteen(), "TIFF"), as_rgb(gray())),
    "32-bit TIFF": lambda: (encoded(Image.fromarray(gray().astype(np.int32) * 257), "TIFF"), as_rgb(gray())),
    "float TIFF": lambda: (encoded(Image.fromarray(gray().astype(np.float32) / 255), "TIFF"), as_rgb(gray())),
    "1-bit PNG": lambda: (encoded(Image.fromarray(gray() > 128), "PNG"), as_rgb((gray() > 128) * 255)),
    "palette PNG": lambda: (encoded(palette(), "PNG"), np.asarray(palette().convert("RGB"))),
    "GIF": lambda: (encoded(palette(), "GIF"), np.asarray(palette().convert("RGB"))),
    "transparent palette": transparent_palette,
    "RGBA PNG": lambda: (encoded(with_alpha(), "PNG"), picture()),
    "RGBA WebP": lambda: (encoded(with_alpha(), "WEBP", lossless=True, exact=True), picture()),
    "gray with alpha": lambda: (
        encoded(Image.fromarray(np.stack([gray(), np.full_like(gray(), 255)], 2)), "PNG"),
        as_rgb(gray()),
    ),
    "EXIF-rotated": lambda: (rotated(), picture()),
    "animated GIF": lambda: (animated("GIF"), picture()),
    "animated WebP": lambda: (animated("WEBP"), picture()),
}


@pytest.mark.parametrize("interpolation", ["bicubic", "fast_bilinear"])
@pytest.mark.parametrize("kind", GOOD)
def test_every_kind_comes_out_as_it_is_looked_at(kind, interpolation):
    data, expected = GOOD[kind]()
    shown = decoded(data, interpolation=interpolation).astype(float)
    assert shown.shape == (HEIGHT, WIDTH, 3)
    assert np.abs(shown.mean(axis=(0, 1)) - expected.mean(axis=(0, 1))).max() / 255 < 0.01
    assert np.abs(shown - expected).mean() < 4  # of the right way round; JPEG and GIF are lossy


def bomb(width, height):
    """A PNG of a few kilobytes that says it is large."""

    def chunk(name, content):
        return len(content).to_bytes(4, "big") + name + content + zlib.crc32(name + content).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    lines = zlib.compress(bytes(100_000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", lines) + chunk(b"IEND", b"")


PNG, JPEG = GOOD["PNG"]()[0], GOOD["JPEG"]()[0]
BAD = {
    "empty": b"",
    "zero bytes": bytes(1000),
    "html": b"<!doctype html><html><body>404</body></html>",
    "random": random.Random(0).randbytes(1000),
    "header only": PNG[:8],
    "PNG cut short": PNG[:-200],
    "JPEG cut short": JPEG[: len(JPEG) // 2],
    "JPEG without its last 2 bytes": JPEG[:-2],
    "PNG with a flipped bit": PNG[:60] + bytes([PNG[60] ^ 4]) + PNG[61:],
    "bomb": bomb(20_000, 20_000),
    "Postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\nshowpage\n",
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="40" height="30"/>',
    "floats above 1": encoded(Image.fromarray(np.full((4, 4), 7.0, np.float32)), "TIFF"),
    "floats that are none": encoded(Image.fromarray(np.full((4, 4), np.nan, np.float32)), "TIFF"),
    "32 bits": encoded(Image.fromarray(np.full((4, 4), 1 << 20, np.int32)), "TIFF"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_decoded_is_an_error_that_names_the_file(kind, tmp_path):
    with pytest.raises(UserError, match=r"^the name\.png: ") as by_pillow:
        decoded(BAD[kind])
    with pytest.raises(UserError) as fast:
        decoded(BAD[kind], interpolation="fast_bicubic")
    assert str(fast.value) == str(by_pillow.value)
    assert ("exceeds limit" in str(fast.value)) == (kind == "bomb"), "refused before it is decoded"
    path = tmp_path / "a file.png"
    path.write_bytes(BAD[kind])
    with pytest.raises(UserError) as caught:
        decode(path, str(path), size=(8, 8), choose_box=all_of)
    assert len(caught.value.problems) == 1
    assert str(path) in caught.value.problems[0]
    assert "\n" not in caught.value.problems[0]


def test_a_file_that_is_not_there_is_not_called_damaged():
    text = r"^row 7: cannot be read \(.*No such file or directory: 'gone.png'\)$"
    with pytest.raises(UserError, match=text):
        decode(Path("gone.png"), "row 7", size=(8, 8), choose_box=all_of)


BOXES = [(0, 0, 500, 375), (100, 50, 400, 300), (13.5, 7.25, 480.5, 360.75), (200, 100, 260, 150), (0, 0, 30, 30)]


@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("form", ["JPEG", "PNG", "gray PNG"])
def test_a_part_lies_where_pillow_finds_it(form, box):
    """Decoded at a part of its size and converted in part, against the whole."""
    image = Image.fromarray(picture(375, 500))
    image = image.convert("L") if form == "gray PNG" else image
    data = encoded(image, form.split()[-1], **({"quality": 95} if form == "JPEG" else {}))
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    expected = np.asarray(whole.resize((56, 56), Image.Resampling.BICUBIC, box=box)).astype(float)
    shown = decode(data, "x", size=(56, 56), choose_box=lambda *_: box).astype(float)
    # gradients of up to a level a pixel: a part that is half a pixel off differs by more
    assert np.abs(shown - expected).max() <= (3 if form == "JPEG" else 1)
    assert np.abs(shown - expected).mean() < (0.6 if form == "JPEG" else 0.1)


def test_the_box_is_chosen_from_the_size_as_looked_at():
    sizes = []

    def choose(width, height):
        sizes.append((width, height))
        return 0, 0, width, height

    for data in (rotated(), PNG, JPEG):
        decode(data, "x", size=(4, 4), choose_box=choose)
    assert sizes == [(WIDTH, HEIGHT)] * 3


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_are_rounded_to_the_nearest_of_eight(form):
    values = np.arange(65536).reshape(256, 256).astype(np.uint16)
    shown = decoded(encoded(Image.fromarray(values), form), size=(256, 256))
    assert np.array_equal(shown[..., 0], np.round(values / 257).astype(np.uint8))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("form", ["PNG", "JPEG"])
def test_no_rounding_reaches_beyond_the_image(mode, form):
    white = encoded(Image.new(mode, (29, 29), "white"), form)  # 28 * (29 / 28) is above 29, and 29 * (15 / 29) above 15
    middle = partial(centre_box, target=(28, 28), fraction=1.0)
    assert decode(white, "x", size=(28, 28), choose_box=middle).min() == 255
    assert decode(white, "x", size=(9, 9), choose_box=all_of).min() == 255


def photograph(width, height):
    """Noise over gradients: a JPEG with all of its frequencies."""
    noise = np.random.default_rng(width).normal(0, 25, (height, width, 3))
    return Image.fromarray((picture(height, width) * 0.8 + 25 + noise).clip(0, 255).astype(np.uint8))


def all_jpegs():
    for width, height in ((101, 77), (64, 48), (17, 1)):
        for chroma, options in enumerate(
            ({}, {"progressive": True}, {"restart_marker_blocks": 3}, {"keep_rgb": True}, {"quality": 30})
        ):
            yield encoded(photograph(width, height), "JPEG", **{"quality": 95, "subsampling": chroma % 3, **options})
    yield encoded(photograph(50, 40).convert("L"), "JPEG")
    yield encoded(photograph(50, 40).convert("CMYK"), "JPEG")


def with_and_without_simplejpeg(monkeypatch, data, **options):
    """Returns pixels or error of both."""
    found = []
    for library in (decoding.simplejpeg, None):
        with monkeypatch.context() as patch:
            patch.setattr(decoding, "simplejpeg", library)
            try:
                found.append(decode(data, "x", interpolation="fast_bicubic", **options).tobytes())
            except UserError as error:
                found.append(str(error))
    return found


@pytest.mark.skipif(decoding.simplejpeg is None, reason="simplejpeg is not installed")
def test_pixels_and_errors_are_the_same_whether_simplejpeg_is_installed(monkeypatch):
    for data in all_jpegs():
        for box in ((0, 0, 17, 1), (5, 0, 16, 1)):
            first, second = with_and_without_simplejpeg(monkeypatch, data, size=(9, 8), choose_box=lambda *_, b=box: b)
            assert first == second
    draw, good, faults = random.Random(3), encoded(photograph(60, 40), "JPEG"), 0
    for _ in range(150):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        first, second = with_and_without_simplejpeg(monkeypatch, bytes(data), size=(40, 60), choose_box=all_of)
        assert first == second
        faults += isinstance(first, str)
    assert faults > 5


def test_what_follows_an_image_in_its_file_is_not_read(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(encoded(photograph(60, 40), "JPEG"))
    expected = decoded(path, interpolation="fast_bicubic")
    with path.open("r+b") as file:
        file.truncate(2**40)  # takes no space
    assert np.array_equal(decoded(path, interpolation="fast_bicubic"), expected)


@pytest.mark.parametrize("kernel", ["bicubic", "bilinear"])
def test_fast_resizing_differs_from_pillow_s_in_rounding_only(kernel):
    image = photograph(500, 375)
    data, whole = encoded(image, "JPEG", quality=95), Image.open(io.BytesIO(encoded(image, "JPEG", quality=95)))
    for box in ((0, 0, 500, 375), (100, 50, 400, 300), (213, 100, 261, 150), (0, 0, 30, 30)):
        expected = np.asarray(whole.crop(box).resize((224, 200), Image.Resampling[kernel.upper()])).astype(int)
        choose = {"choose_box": lambda *_, box=box: box, "interpolation": f"fast_{kernel}"}
        shown = decode(data, "x", size=(200, 224), **choose)
        assert np.abs(shown - expected).max() <= 2
        assert (shown != expected).mean() < 0.06
        # a JPEG at a part of its size, to whole pixels of which the crop is rounded
        smaller = decode(data, "x", size=(12, 12), **choose).astype(float)
        fine = decode(data, "x", size=(12, 12), choose_box=choose["choose_box"], interpolation=kernel)
        assert np.abs(smaller - fine).mean() < 3
