import json
from pathlib import Path

import pytest
from PIL import Image

from tests.training.conftest import draw_sprite
from training import sprites
from training.sprites import SETS, FolderSource, SpritePack, look, normalize_label, square


def test_sets_are_permissive_and_carry_their_licence() -> None:
    assert {s.license for s in SETS} <= {"Apache-2.0", "MIT", "CC-BY-4.0"}
    assert all(s.attribution and s.version for s in SETS)
    assert len({s.style for s in SETS}) == len(SETS)


def test_square_centres_what_is_opaque() -> None:
    canvas = Image.new("RGBA", (300, 100))
    canvas.paste((255, 0, 0, 255), (10, 20, 90, 60))
    found = square(canvas)
    assert found is not None and found.size == (sprites.SIZE, sprites.SIZE)
    assert found.getpixel((80, 80)) == (255, 0, 0, 255) and found.getpixel((80, 10))[3] == 0
    assert square(Image.new("RGBA", (50, 50))) is None


def test_look_names_the_dominant_colour() -> None:
    word, mean = look(Image.new("RGBA", (160, 160), (225, 65, 65, 255)))
    assert word == "red" and mean == (225, 65, 65)
    assert look(Image.new("RGBA", (160, 160)))[0] is None


def test_pack_round_trip(pack: SpritePack, tmp_path: Path) -> None:
    pack.save(tmp_path)
    again = SpritePack.load(tmp_path)
    assert again == pack
    assert again.image(3).tobytes() == pack.image(3).tobytes()
    assert SpritePack.load(tmp_path, images=False).blob == b""


def test_build_keeps_what_enough_sets_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, s in enumerate(SETS):
        (tmp_path / s.package / "assets").mkdir(parents=True)
        draw_sprite(0.1, i).save(tmp_path / s.package / "assets" / "1f34e.webp")
        if i < sprites.MIN_STYLES - 1:
            draw_sprite(0.2, i).save(tmp_path / s.package / "assets" / "1f34c.webp")
    names = tmp_path / "emojibase-data" / "en"
    names.mkdir(parents=True)
    emoji = [{"label": "red apple", "hexcode": "1F34E"}, {"label": "banana", "hexcode": "1F34C"}]
    (names / "data.json").write_text(json.dumps(emoji))
    monkeypatch.setattr(sprites, "read_concepts", lambda: {"red apple": [], "banana": []})
    built = sprites.build(tmp_path)
    assert built.concepts == ("red apple",) and len(built.sprites) == len(SETS)
    assert sprites.missing(built) == ["banana"]


def test_a_set_finds_pictures_by_either_code(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    draw_sprite(0.3, 1).save(tmp_path / "assets" / "2764-fe0f.webp")
    source = FolderSource(tmp_path)
    assert source.render("red heart", "2764") and source.render("red heart", "2764-FE0F")
    assert source.render("star", "2B50") is None


def test_labels_become_words() -> None:
    assert normalize_label("Jack-O’-Lantern") == "jack o lantern"
