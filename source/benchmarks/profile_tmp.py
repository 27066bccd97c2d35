import sys, torch, torch.distributed as dist
import sharded_step as S
from measured_optimizers import shapes_of
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.device_mesh import init_device_mesh
dev=torch.device("cuda"); dist.init_process_group("fake",rank=0,world_size=2,store=FakeStore())
mesh=init_device_mesh("cuda",(2,))
for layout in ("zero1",):
    m=S.sharded(shapes_of("dpa3"),mesh,dev,layout); S.give_gradients(m,dev)
    step=S.contestants(m,mesh,layout,peers=False,on_gpu=True)["HybridMuon, captured"]()
    for _ in range(3): step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        for _ in range(5): step()
        torch.cuda.synchronize()
    for e in sorted(prof.key_averages(), key=lambda e:-e.device_time_total)[:28]:
        print(f"{e.device_time_total/5:9.1f} us {e.count/5:6.0f} x {e.key[:110]}")
    print("kernels", sum(e.count for e in prof.key_averages())/5, "us", sum(e.device_time_total for e in prof.key_averages())/5)
