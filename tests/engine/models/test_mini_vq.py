import pytest
import torch

from engine.models.mini_vq import FSQ, FSQTokenizer, FSQTokenizerConfig

TINY = FSQTokenizerConfig((8, 8, 8), (1, 1, 1), (8, 8, 8), (1, 1, 1))


@pytest.fixture
def tokenizer() -> FSQTokenizer:
    torch.manual_seed(0)
    return FSQTokenizer(TINY).eval()


def test_indices_and_codes_are_inverse() -> None:
    fsq, indices = FSQ(8, 4), torch.arange(4096).view(1, 64, 64)
    codes = fsq.codes(indices)
    assert codes.min() == -1 and codes.max() < 1
    torch.testing.assert_close(fsq.indices(codes), indices)


def test_quantiser_reaches_every_level_and_passes_gradients() -> None:
    z = torch.linspace(-9, 9, 4000).view(1, 4, 100, 10).requires_grad_()
    codes = FSQ(8, 4)(z)
    assert len(codes.unique()) == 8
    codes.sum().backward()
    assert z.grad is not None and (z.grad > 0).any()


def test_shapes_range_and_raster_order(tokenizer: FSQTokenizer) -> None:
    images = torch.rand(2, 3, 24, 40)
    tokens = tokenizer.encode(images)
    assert tokens.shape == (2, 15) and tokens.dtype == torch.int64
    pixels = tokenizer.decode(tokens, 3, 5)
    assert pixels.shape == images.shape and pixels.dtype == torch.float32
    assert pixels.min() >= 0 and pixels.max() <= 1


def test_a_picture_ignores_its_batch_mates(tokenizer: FSQTokenizer) -> None:
    tokens = torch.randint(0, 4096, (4, 9))
    together = tokenizer.decode(tokens, 3, 3)
    torch.testing.assert_close(together[2:3], tokenizer.decode(tokens[2:3], 3, 3))


def test_refusals_say_what_is_wrong(tokenizer: FSQTokenizer) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        tokenizer.encode(torch.rand(1, 3, 20, 24))
    with pytest.raises(ValueError, match=r"\[B, 9\]"):
        tokenizer.decode(torch.zeros(1, 8, dtype=torch.long), 3, 3)
    with pytest.raises(ValueError, match="0..4095"):
        tokenizer.decode(torch.full((1, 9), 4096), 3, 3)
    with pytest.raises(ValueError, match="depth"):
        FSQTokenizerConfig.from_dict({"depth": 3})
    with pytest.raises(ValueError, match="equally many"):
        FSQTokenizerConfig(encoder_channels=(8, 8))


def test_config_round_trip() -> None:
    assert FSQTokenizerConfig.from_dict(TINY.to_dict()) == TINY
    assert FSQTokenizerConfig().factor == 8 and FSQTokenizerConfig().codes == 4096
