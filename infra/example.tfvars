# A fleet of four trn1.32xlarge that retrains every night at 02:00. Copy to terraform.tfvars and correct.
name              = "relevance"
region            = "us-west-2"
availability_zone = "us-west-2d" # one that offers trn1 in your account: aws ec2 describe-instance-type-offerings

image     = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:0000000000000000000000000000000000000000000000000000000000000000"
cpu_image = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:1111111111111111111111111111111111111111111111111111111111111111"

max_nodes     = 4
quota_vcpus   = 512 # the account's quota "Running On-Demand Trn instances"; four trn1.32xlarge need 512
ami_id        = ""  # to be chosen: make bootstrap, step 6; empty is refused, as the newest image cannot run the container
budget_usd    = 20000
notify_emails = ["search-platform@example.com"]

schedule_expression = "cron(0 2 * * ? *)"
timezone            = "Europe/Berlin"

data = [
  { bucket = "example-search-logs", prefix = "relevance" },
]
