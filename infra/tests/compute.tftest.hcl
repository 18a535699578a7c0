# Machines and queues, module by module.

mock_provider "aws" {
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/relevance" }
  }

  mock_resource "aws_iam_instance_profile" {
    defaults = { arn = "arn:aws:iam::123456789012:instance-profile/relevance" }
  }
}

variables {
  name              = "relevance"
  emulator          = false
  subnet_id         = "subnet-1"
  security_group_id = "sg-1"
  instance_type     = "trn1.32xlarge"
  max_vcpus         = 512
  efa_interfaces    = 8
  ami_id            = "ami-0123456789abcdef0"
  capacity_block_id = ""
  root_volume_gib   = 512
  stop_timeout_s    = 45
  cpu               = { instance_types = ["m6i"], max_vcpus = 64, spot = true, root_volume_gib = 80 }
}

run "trn1_with_eight_efa_interfaces_and_spot_for_the_rest" {
  command = plan

  module {
    source = "./modules/compute"
  }

  assert {
    condition = [for one in aws_launch_template.trainium.network_interfaces : "${one.interface_type} ${one.network_card_index} ${one.device_index}"] == [
      "efa 0 0", "efa 1 1", "efa 2 1", "efa 3 1", "efa 4 1", "efa 5 1", "efa 6 1", "efa 7 1"
    ]
    error_message = "card 0 is device 0, the others are device 1"
  }

  assert {
    condition = alltrue([for one in aws_launch_template.trainium.network_interfaces :
      one.associate_public_ip_address == null && one.security_groups == toset(["sg-1"])
    ])
    error_message = "no interface asks for a public address; all are in the nodes' group"
  }

  assert {
    condition     = aws_batch_compute_environment.trainium.compute_resources[0].security_group_ids == null
    error_message = "groups of the environment and interfaces of the template exclude each other"
  }

  assert {
    condition     = aws_batch_compute_environment.trainium.compute_resources[0].placement_group == "relevance-trainium" && aws_placement_group.trainium[0].strategy == "cluster"
    error_message = "the nodes of a multi-node job are placed together"
  }

  assert {
    condition     = aws_batch_compute_environment.trainium.compute_resources[0].type == "EC2" && aws_batch_compute_environment.trainium.compute_resources[0].allocation_strategy == "BEST_FIT_PROGRESSIVE"
    error_message = "on demand (AWS Batch runs no multi-node job on Spot), and updatable"
  }

  assert {
    condition     = aws_batch_compute_environment.trainium.compute_resources[0].ec2_configuration[0].image_id_override == var.ami_id && aws_batch_compute_environment.trainium.compute_resources[0].max_vcpus == 512
    error_message = "the image with the Neuron driver, and no more machines than asked for"
  }

  assert {
    condition     = length(aws_launch_template.trainium.instance_market_options) == 0 && length(aws_iam_role.service) == 0
    error_message = "on demand, with the service-linked role"
  }

  assert {
    condition = alltrue([for template in [aws_launch_template.trainium, aws_launch_template.cpu] :
      template.metadata_options[0].http_tokens == "required" && template.metadata_options[0].http_put_response_hop_limit == 1
    ])
    error_message = "IMDSv2 with one hop"
  }

  assert {
    condition = alltrue([for template in [aws_launch_template.trainium, aws_launch_template.cpu] :
      strcontains(base64decode(template.user_data), "ECS_CONTAINER_STOP_TIMEOUT=45s\nECS_AWSVPC_BLOCK_IMDS=true\nECS_ENABLE_SPOT_INSTANCE_DRAINING=true\n") && startswith(base64decode(template.user_data), "MIME-Version: 1.0\nContent-Type: multipart/mixed")
    ])
    error_message = "user data is MIME and configures the agent: ${base64decode(aws_launch_template.cpu.user_data)}"
  }

  assert {
    condition = alltrue([for template in [aws_launch_template.trainium, aws_launch_template.cpu] :
      template.block_device_mappings[0].ebs[0].volume_type == "gp3" && template.block_device_mappings[0].ebs[0].encrypted == "true"
    ])
    error_message = "an encrypted gp3 root volume"
  }

  assert {
    condition     = [for template in [aws_launch_template.trainium, aws_launch_template.cpu] : template.block_device_mappings[0].ebs[0].volume_size] == [512, 80]
    error_message = "a volume for each kind of machine: every small CPU machine would pay for that of Trainium"
  }

  # gp3 takes 0.25 MiB/s for each of its operations a second.
  assert {
    condition = alltrue([for disk in [aws_launch_template.trainium.block_device_mappings[0].ebs[0]] :
      disk.throughput == 1000 && disk.iops * 0.25 >= disk.throughput
    ])
    error_message = "the image is unpacked at 21 dollars an hour: not at gp3's own 125 MiB/s"
  }

  assert {
    condition     = strcontains(base64decode(aws_launch_template.trainium.user_data), "\nsysctl -w net.ipv4.ip_local_reserved_ports=41000,48620,62182\n")
    error_message = "the ports of rank 0 may be given to a connection of the host"
  }

  assert {
    condition     = aws_iam_role_policy_attachment.instance.policy_arn == "arn:aws:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
    error_message = "the instance's role is for the agent"
  }

  assert {
    condition     = aws_batch_compute_environment.cpu.compute_resources[0].type == "SPOT" && aws_batch_compute_environment.cpu.compute_resources[0].allocation_strategy == "SPOT_PRICE_CAPACITY_OPTIMIZED"
    error_message = "Spot, cheapest of what lasts"
  }
}

run "trn2_has_sixteen_and_comes_from_a_capacity_block" {
  command = plan

  module {
    source = "./modules/compute"
  }

  variables {
    instance_type     = "trn2.48xlarge"
    efa_interfaces    = 16
    capacity_block_id = "cr-0123456789abcdef0"
  }

  assert {
    condition     = length(aws_launch_template.trainium.network_interfaces) == 16 && aws_batch_compute_environment.trainium.compute_resources[0].instance_type == toset(["trn2.48xlarge"])
    error_message = "sixteen cards, of that type alone"
  }

  assert {
    condition     = aws_launch_template.trainium.instance_market_options[0].market_type == "capacity-block" && length(aws_placement_group.trainium) == 0
    error_message = "from its capacity block, which has a placement of its own"
  }

  assert {
    condition     = join(" ", aws_launch_template.trainium.network_interfaces[*].network_card_index) == join(" ", range(16)) && sum(aws_launch_template.trainium.network_interfaces[*].device_index) == 15
    error_message = "sixteen cards, one of them with device 0"
  }

  assert {
    condition     = aws_launch_template.trainium.instance_market_options[0].market_type == "capacity-block" && aws_launch_template.trainium.capacity_reservation_specification[0].capacity_reservation_target[0].capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "instances come from the block"
  }
}

run "trn1_2xlarge_has_none_and_cpu_machines_are_on_demand" {
  command = plan

  module {
    source = "./modules/compute"
  }

  variables {
    instance_type  = "trn1.2xlarge"
    efa_interfaces = 0
    cpu            = { instance_types = ["m6i"], max_vcpus = 64, spot = false, root_volume_gib = 80 }
  }

  assert {
    condition     = length(aws_launch_template.trainium.network_interfaces) == 0 && aws_batch_compute_environment.trainium.compute_resources[0].security_group_ids == toset(["sg-1"]) && length(aws_placement_group.trainium) == 0
    error_message = "without interfaces the environment names the group"
  }

  assert {
    condition     = aws_batch_compute_environment.cpu.compute_resources[0].type == "EC2" && aws_batch_compute_environment.cpu.compute_resources[0].allocation_strategy == "BEST_FIT_PROGRESSIVE"
    error_message = "spot = false means on demand"
  }
}

run "queues_have_the_policy_from_the_first_day" {
  command = plan

  module {
    source = "./modules/queues"
  }

  variables {
    trainium_environment_arn = "arn:aws:batch:us-west-2:123456789012:compute-environment/trainium"
    cpu_environment_arn      = "arn:aws:batch:us-west-2:123456789012:compute-environment/cpu"
    shares                   = { production = 1, experiments = 2 }
    share_decay_s            = 3600
    compute_reservation      = 10
    wait_limit_s             = 7200
  }

  assert {
    condition     = join(" ", sort([for share in aws_batch_scheduling_policy.this.fair_share_policy[0].share_distribution : "${share.share_identifier}=${share.weight_factor}"])) == "experiments=2 production=1"
    error_message = "weights of the shares"
  }

  assert {
    condition = alltrue([for queue in aws_batch_job_queue.this :
      length(queue.job_state_time_limit_action) == 3 && alltrue([for one in queue.job_state_time_limit_action : one.max_time_seconds == 7200 && one.action == "CANCEL" && one.state == "RUNNABLE"])
    ])
    error_message = "what blocks the head of a queue is cancelled after two hours"
  }

  assert {
    condition     = sort([for queue in aws_batch_job_queue.this : queue.name]) == tolist(["relevance-cpu", "relevance-trainium"])
    error_message = "two queues"
  }
}
