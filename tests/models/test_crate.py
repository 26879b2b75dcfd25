import numpy as np
import torch

from vit_lightning.models.crate import coding_rate


def test_coding_rate_is_the_sum_of_logarithms_over_subspaces():
    draws = np.random.default_rng(0)
    z, subspaces = draws.standard_normal((2, 7, 6)), draws.standard_normal((3, 4, 6))
    projected = np.einsum("sde,bne->bsdn", subspaces, z)
    # as the paper has it, over tokens; ours is over channels, which is smaller and has the same determinant
    gram = np.eye(7) + 4 / (7 * 0.3**2) * projected.swapaxes(-1, -2) @ projected
    expected = 0.5 * np.log(np.linalg.det(gram)).sum(axis=1)
    rates = coding_rate(torch.from_numpy(z), torch.from_numpy(subspaces), precision=0.3)
    np.testing.assert_allclose(rates.numpy(), expected, rtol=1e-10)
    assert (coding_rate(torch.from_numpy(0.1 * z), torch.from_numpy(subspaces)) < rates).all()
